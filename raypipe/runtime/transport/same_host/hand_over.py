"""Hands open files from one process of a host to another, over a Unix socket with an abstract address.

Neither the files nor the address has a name in a file system, so the kernel frees all of it with the last process that
has it open: whichever processes are killed, and whenever, nothing is left on the host and nothing needs a sweep.
Abstract addresses (``man 7 unix``) have no permissions; both sides check that the other one is the same user's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterable

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
