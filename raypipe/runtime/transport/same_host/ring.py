"""A ring of bytes in memory that two processes of one host share: one writes, the other reads, in order.

The writer's and the reader's positions count bytes since the ring was made and never wrap. The reader publishes its
position in the first eight bytes of the file; the writer knows its own. A block never wraps around the end, so that
both sides copy it with one call.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from pathlib import Path

_ALIGN = 64
_HEADER = 64


def directory() -> Path:
    """Return where processes of a host share files: in memory if the system offers that, else its temporary folder."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def shared_file(nbytes: int) -> int:
    """Make a file without a name that processes can share, with its memory reserved; the caller closes it.

    Writing to a full /dev/shm would kill the process later.

    Raises:
        OSError: there isn't enough room.
    """
    with tempfile.TemporaryFile(dir=directory()) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        else:
            os.ftruncate(file.fileno(), nbytes)
        return os.dup(file.fileno())


def ring_file(capacity: int) -> int:
    """Make the file of a ring of ``capacity`` bytes; errors as for ``shared_file``."""
    return shared_file(_HEADER + capacity)


class Ring:
    """One mapping of a ring's file. It stays when the file ``fd`` is closed. Raises OSError if it cannot be mapped."""

    def __init__(self, fd: int, capacity: int) -> None:
        self.capacity = capacity
        self._written = 0
        self._map = mmap.mmap(fd, _HEADER + capacity, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        # An aligned native 8-byte store, which the other process sees whole or not at all.
        self._released = ctypes.c_int64.from_buffer(self._map)
        self._base = ctypes.addressof(self._released) + _HEADER

    def holds(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` always fit once the reader has caught up, wherever the ring's end falls."""
        return 2 * (nbytes + _ALIGN) <= self.capacity

    def place(self, nbytes: int) -> int | None:
        """Position for a block of ``nbytes``, or None while the reader still uses that room."""
        start = self._written
        left = self.capacity - start % self.capacity
        if nbytes > left:  # start again at the front rather than wrap
            start += left
        end = start + nbytes + (-nbytes) % _ALIGN
        if end - self._released.value > self.capacity:
            return None
        self._written = end
        return start

    def address(self, position: int) -> int:
        """Where the block at this position lies in this process."""
        return self._base + position % self.capacity

    def release(self, position: int, nbytes: int) -> None:
        """Let the writer overwrite the block at ``position`` and everything before it. The reader calls this."""
        self._released.value = position + nbytes + (-nbytes) % _ALIGN

    def close(self) -> None:
        """Unmap the file; idempotent."""
        if self._base:
            self._base = 0
            del self._released
            self._map.close()


def capacity_for(nbytes: int, at_least: int) -> int:
    """The smallest power-of-two capacity from ``at_least`` that holds two blocks of ``nbytes``.

    >>> capacity_for(3000, 4096), capacity_for(10, 4096)
    (8192, 4096)
    """
    capacity = at_least
    while capacity < 2 * (nbytes + _ALIGN):
        capacity *= 2
    return capacity
