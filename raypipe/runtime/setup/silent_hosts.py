"""Notice a host that has fallen silent: it has lost its network or its power, so that nothing ends its connections.

A kernel sends again for a quarter of an hour what nobody acknowledges, and asks after an idle connection once in two
hours. So whoever waits for a device there would wait until ``train.message_timeout_s``, or until Ray has given the node
up and then some. A thread looks each second when this host last heard from the kernels of the others, on any of the
connections that there are, and ends those to one that was silent for ``SILENT_S``. Everybody who waits on them then
fails as if the device had died, and recovery begins.

It is the kernel that answers: a process that is stopped, computes for long or reads nothing makes no host silent, and
of a slow link one acknowledgement on one of the connections is enough. The time limits of TCP would not do: that of
``TCP_USER_TIMEOUT`` ends the connection to a process that is stopped and whose buffer is full, however often its kernel
answers; and that of keep-alive probes does not count while anything is on its way.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import struct
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress

LOOK_S = 1.0
"""Interval at which is looked, and idle connections are probed."""
SILENT_S = 5.0
"""Time after which a host counts as lost."""
LOOKS = 2
"""Looks in a row at which it must have been silent: this host itself may have slept."""
_INFO = struct.Struct("=B55xI")
"""Of ``struct tcp_info``: state, and the milliseconds since the last acknowledgement came (``tcpi_last_ack_recv``)."""
_ESTABLISHED = 1


class SilentHosts:
    """Ends this process's connections to hosts that fall silent, except those that were open before.

    Args:
        addresses: IP addresses of these hosts; names are left out.
    """

    def __init__(self, addresses: Collection[str]) -> None:
        self._addresses: set[str] = set()
        for address in addresses:
            with suppress(ValueError):  # a name; nothing tells which connections are to it
                self._addresses.add(_plain(address))
        with ExitStack() as held:
            found = _connections() if addresses else ()
            self._before = {inode for inode, connection in found if held.enter_context(connection)}
        """Ray's own, which it sees to itself. An acknowledgement on them counts, and that none comes does not."""
        self._looks: dict[str, int] = {}
        """By address, at how many looks in a row it has been silent."""
        self.lost: Future[str] = Future()
        """Ends with the address of the first host that is lost."""
        self._closed = threading.Event()
        if addresses:
            threading.Thread(target=self._watch, name="raypipe-silent-hosts", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        with ExitStack() as held:
            own: dict[str, list[socket.socket]] = {}
            silent_ms: dict[str, int] = {}
            for inode, connection in _connections():
                held.enter_context(connection)
                with suppress(OSError):  # it has ended meanwhile
                    if (address := _plain(connection.getpeername()[0])) not in self._addresses:
                        continue
                    state, ms = _INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
                    if state != _ESTABLISHED:
                        continue
                    silent_ms[address] = min(ms, silent_ms.get(address, ms))
                    if inode not in self._before:
                        _probe(connection)
                        own.setdefault(address, []).append(connection)
            silent = [address for address in own if silent_ms[address] >= 1000 * SILENT_S]
            self._looks = {address: self._looks.get(address, 0) + 1 for address in silent}
            for address in [address for address, looks in self._looks.items() if looks >= LOOKS]:
                if not self.lost.done():
                    self.lost.set_result(address)
                for connection in own[address]:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)


def _connections() -> Iterator[tuple[int, socket.socket]]:
    """Yield this process's TCP sockets by inode, each with a descriptor of its own that the caller closes."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            known = os.fstat(int(name))
            if not stat.S_ISSOCK(known.st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                yield known.st_ino, connection
            else:
                connection.close()


def _probe(connection: socket.socket) -> None:
    """Have the kernel ask after the other one each second while nothing is on its way, and never give it up itself."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, int(LOOK_S)),
        (socket.TCP_KEEPINTVL, int(LOOK_S)),
        (socket.TCP_KEEPCNT, 127),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _plain(address: str) -> str:
    return str(ipaddress.ip_address(address.strip("[]").partition("%")[0]))
