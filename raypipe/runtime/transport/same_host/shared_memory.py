"""Same-host channel for CPU tensors: payload in a shared ring, headers in a named pipe that also wakes the reader.

One pipe and one ring per directed edge. The reader makes the pipe; the writer connects to it, unlinks its name and
makes the ring; the reader maps the ring and unlinks that: from then on the files have no name, so a run that is killed
leaves nothing behind. A pipe whose other end is closed says so at once: so either side learns of its peer's death.

A frame in the pipe is: length of what follows, kind, a number, then a body.

=========  =============================  =====================================
kind       number                         body
=========  =============================  =====================================
INLINE     length of the header           header (``wire``), then the payload
IN_RING    position of the payload        header
NEW_RING   capacity                       generation, which names the ring's file
=========  =============================  =====================================

When a ring is full it is replaced by a larger one, so that sending needs no room made by a slow reader; only what
cannot be placed even so waits in the sender. The two ends are in ``shm_send`` and ``shm_receive``.
"""

from __future__ import annotations

import struct
from pathlib import Path

from raypipe.runtime.transport.same_host.ring import directory

FRAME = struct.Struct("=IBq")
LENGTH_BYTES = 4
INLINE, IN_RING, NEW_RING = range(3)

INLINE_LIMIT = 2048
"""Payloads up to this many bytes travel in the pipe: cheaper than placing them in the ring."""
PIPE_BYTES = 1 << 20
SMALLEST_RING = 1 << 16
LARGEST_RING = 1 << 28
"""A ring stops growing for depth here; a message larger than half of it still gets the room it needs."""


def file_path(run_id: str, src: int, dst: int, what: str) -> Path:
    """Return the name of a file at which the two ends of an edge meet before they unlink it."""
    return directory() / f"raypipe-{run_id}-{src}-{dst}.{what}"


def remove_rings(run_id: str, src: int, dst: int) -> None:
    """Remove the ring files of one edge that its reader has not opened."""
    for file in directory().glob(f"raypipe-{run_id}-{src}-{dst}.ring*"):
        file.unlink(missing_ok=True)


def cleanup(run_id: str) -> int:
    """Remove the files that a run left on this host because it died while opening channels. Returns their number."""
    files = list(directory().glob(f"raypipe-{run_id}-*"))
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)
