"""Same-host channel for CPU tensors: payload in a shared ring, headers in a pipe that also wakes the reader.

One pipe and one ring per directed edge. The reader listens (``hand_over``); the writer makes both, hands over the
pipe's other end and the ring's file, and later every larger ring. None of them has a name in a file system, so a run
that is killed leaves nothing behind. A pipe whose other end is closed says so at once: so either side learns of its
peer's death.

A frame in the pipe is: length of what follows, kind, a number, then a body.

=========  =============================  =====================================
kind       number                         body
=========  =============================  =====================================
INLINE     length of the header           header (``wire``), then the payload
IN_RING    position of the payload        header
NEW_RING   capacity                       empty; its file was handed over before
=========  =============================  =====================================

When a ring is full it is replaced by a larger one, so that sending needs no room made by a slow reader; only what
cannot be placed even so waits in the sender. The two ends are in ``shm``.
"""

from __future__ import annotations

import struct

FRAME = struct.Struct("=IBq")
LENGTH_BYTES = 4
INLINE, IN_RING, NEW_RING = range(3)

INLINE_LIMIT = 2048
"""Payloads up to this many bytes travel in the pipe: cheaper than placing them in the ring."""
PIPE_BYTES = 1 << 20
SMALLEST_RING = 1 << 16
LARGEST_RING = 1 << 28
"""A ring stops growing for depth here; a message larger than half of it still gets the room it needs."""


def edge_name(run_id: str, src: int, dst: int) -> str:
    """Return the name under which the reader of an edge listens."""
    return f"{run_id}-{src}-{dst}"
