"""What a stage actor's process sets once, before any tensor exists."""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch

MMAP_THRESHOLD_BYTES = 32 << 20
"""The largest that glibc accepts."""
TRIM_THRESHOLD_BYTES = 2**31 - 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def set_up_process(device: torch.device) -> None:
    """One compute thread, ordinary priority, and freed activations kept for the next micro-batch."""
    torch.set_num_threads(1)
    # Ray starts workers at niceness 15: any other process would push a stage, and so the whole pipeline, aside.
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    if device.type == "cpu":
        _keep_freed_memory()


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def heap_bytes() -> int:
    """Bytes that malloc has handed out and not got back, over all arenas: what a leak grows, and nothing else does.

    Raises OSError or AttributeError where the C library is not glibc >= 2.33.
    """
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _MallInfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def _keep_freed_memory() -> None:
    """Have malloc reuse activations' pages: by default it gives them back and faults them in again, a few % of a step.

    glibc only; elsewhere nothing is changed.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
