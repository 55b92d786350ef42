"""A buffer in memory that two processes of one host share: one writes blocks, the other reads them in the same order.

The writer may place a block wherever no unread one lies, since each message says where its block is; at the front when
all have been read, so that the same pages serve again. The reader publishes how many bytes it has read in the first
eight bytes of the file. The file is as long as any buffer can become, but only what is reserved takes memory: the
writer reserves more where blocks wait, and both mappings stay as they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import struct
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

_ALIGN = 64
_HEADER = 64
_LONGEST = 1 << 38
"""Bytes of the file and of its mappings; addresses cost nothing."""


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
        _reserve(file.fileno(), nbytes)
        return os.dup(file.fileno())


def _reserve(file: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, nbytes)
    else:
        os.truncate(file, max(nbytes, os.fstat(file).st_size))


class Ring:
    """One end's mapping of a buffer's file, whose first ``capacity`` bytes are reserved.

    Raises OSError if there is no memory for them, or the file cannot be mapped.
    """

    def __init__(self, file: int | None = None, capacity: int = 0) -> None:
        """Map ``file``, which stays open; None makes one."""
        self.file = os.dup(file) if file is not None else shared_file(_HEADER + capacity)
        self.capacity = capacity
        self._unread: deque[list[int]] = deque()
        """Start and end of runs of blocks that have not been read, in the order in which they will be."""
        self._known = 0
        """Bytes of blocks that are known to have been read."""
        if file is None:
            os.ftruncate(self.file, _LONGEST)
        self._map = mmap.mmap(self.file, _LONGEST, mmap.MAP_SHARED)
        # An aligned native 8-byte store, which the other process sees whole or not at all.
        self._read = ctypes.c_int64.from_buffer(self._map)
        self._base = ctypes.addressof(self._read) + _HEADER

    def grow(self, capacity: int) -> bool:
        """Reserve more; return whether there is memory for it. The writer calls this."""
        try:
            _reserve(self.file, _HEADER + capacity)
        except OSError:
            return False
        self.capacity = capacity
        return True

    def place(self, nbytes: int) -> int | None:
        """Position for a block of ``nbytes``, or None while unread ones leave no room for it."""
        size = _padded(nbytes)
        unread = self._unread
        left = self._read.value - self._known
        self._known += left
        while left:
            run = unread[0]
            read = min(left, run[1] - run[0])
            run[0] += read
            left -= read
            if run[0] == run[1]:
                unread.popleft()
        if not unread:
            if size > self.capacity:
                return None
            unread.append([0, size])
            return 0
        newest = unread[-1]
        for start in (newest[1], 0, max(run[1] for run in unread)):
            end = start + size
            if end <= self.capacity and all(end <= run[0] or run[1] <= start for run in unread):
                if start == newest[1]:
                    newest[1] = end
                else:
                    unread.append([start, end])
                return start
        return None

    def address(self, position: int) -> int:
        """Where the block at this position lies in this process."""
        return self._base + position

    def release(self, nbytes: int) -> None:
        """Let the writer overwrite the oldest unread block, which has ``nbytes``. The reader calls this."""
        self._read.value += _padded(nbytes)

    def close(self) -> None:
        """Unmap the file; idempotent."""
        if self._base:
            self._base = 0
            del self._read
            self._map.close()
            os.close(self.file)


def _padded(nbytes: int) -> int:
    return nbytes + (-nbytes) % _ALIGN


def capacity_for(nbytes: int, at_least: int) -> int:
    """The smallest power-of-two capacity from ``at_least`` that holds two blocks of ``nbytes``.

    >>> capacity_for(3000, 4096), capacity_for(10, 4096)
    (8192, 4096)
    """
    capacity = at_least
    while capacity < 2 * (nbytes + _ALIGN):
        capacity *= 2
    return capacity


# Open files are handed from one process of a host to another over a Unix socket with an abstract address.
#
# Neither the files nor the address has a name in a file system, so the kernel frees all of it with the last process
# that has it open: whichever processes are killed, and whenever, nothing is left on the host, nothing needs a sweep.
# Abstract addresses (``man 7 unix``) have no permissions; both sides check that the other one is the same user's.

LOOK_S, SELDOM_S = 0.001, 0.05
"""How soon ``call`` looks again whether somebody listens by now, at first and at last; it doubles in between. A hundred
processes of a host that all looked a thousand times a second would keep the one from starting that they wait for."""
_CREDENTIALS = struct.Struct("=iII")
"""Linux's ``struct ucred``: process, user and group."""


def listen(name: str) -> socket.socket:
    """Listen under a name that is unique on this host. Raises OSError if it is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(name))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def answer(listener: socket.socket, timeout_s: float) -> socket.socket | None:
    """Wait for a process of this user to call; return the connection, or None if none did in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        listener.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except (TimeoutError, BlockingIOError):
            return None
        if _same_user(connection):
            return connection
        connection.close()


def call(name: str, timeout_s: float) -> socket.socket | None:
    """Connect to the process that listens under ``name``; return None if none of this user's did in time."""
    deadline, look_s = time.monotonic() + timeout_s, LOOK_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(ConnectionError, BlockingIOError):  # nobody listens yet, or too many call at once
            connection.connect(_address(name))
            if _same_user(connection):
                return connection
        connection.close()
        if time.monotonic() > deadline:
            return None
        time.sleep(look_s)
        look_s = min(2 * look_s, SELDOM_S)


def give(connection: socket.socket, files: Iterable[int]) -> None:
    """Send open files, without waiting for the other side to take them. Raises OSError if it is gone."""
    socket.send_fds(connection, [b"!"], list(files))


def take(connection: socket.socket, count: int, timeout_s: float) -> list[int]:
    """Return ``count`` files that the other side gave at once; the caller closes them.

    Raises:
        OSError: it is gone, or gave nothing in time (TimeoutError).
    """
    connection.settimeout(timeout_s)
    _, files, _, _ = socket.recv_fds(connection, 1, count)
    if len(files) != count:
        for file in files:
            os.close(file)
        raise ConnectionError("the other process has ended")
    return files


def _address(name: str) -> str:
    return f"\0raypipe-{name}"


def _same_user(connection: socket.socket) -> bool:
    result = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(result)[1] == os.geteuid())
