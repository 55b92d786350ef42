"""This host on the network: the interface that process groups use, and other hosts that fall silent."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import struct
import threading
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import NamedTuple

import psutil

from raypipe.errors import ClusterError

# The network interface of process groups: the one that has the address by which Ray knows the node.
#
# Left alone, Gloo resolves the host's own name, which on many machines (Debian's default among them) is a loopback
# address: the other hosts then connect to themselves. Ray's address is known to lead here, for the cluster was made
# with it.

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"


class InterfaceAddress(NamedTuple):
    """An address of this host."""

    interface: str
    address: str


def use_interface(own: str, rendezvous: str, one_host: bool) -> None:
    """Make the process groups of this process use the right interface from now on.

    A setting of the user's (``GLOO_SOCKET_IFNAME``, ``NCCL_SOCKET_IFNAME``) is left as it is.

    Args:
        own: this node's address in Ray.
        rendezvous: that of rank 0's node.
        one_host: all devices are on this node; then Gloo uses loopback, and NCCL chooses for itself.

    Raises:
        ClusterError: no interface of this host carries ``own``, or only loopback does.
    """
    if one_host:
        _set(GLOO, interface_of(LOOPBACK, host_addresses()))
        _set(NCCL, None)
    elif not (_users(GLOO) and _users(NCCL)):
        name = cluster_interface(own, rendezvous, host_addresses())
        _set(GLOO, name)
        _set(NCCL, f"={name}")  # without it NCCL also takes every interface whose name begins so


def cluster_interface(own: str, rendezvous: str, addresses: Iterable[InterfaceAddress]) -> str:
    """The interface by which other nodes reach this one.

    Raises:
        ClusterError: none does.
    """
    fix = f"start Ray on it with --node-ip-address=ADDRESS, one of its own, or set {GLOO} there to the interface"
    name = interface_of(own, addresses)
    if name is None:
        raise ClusterError(f"node {own}", "none of its network interfaces carries the address that Ray has for it", fix)
    # Nodes that share one loopback address are one machine.
    if _plain(own).is_loopback and _plain(own) != _plain(rendezvous):
        raise ClusterError(f"node {own}", "is known to Ray by a loopback address, which other nodes cannot reach", fix)
    return name


def interface_of(address: str, addresses: Iterable[InterfaceAddress]) -> str | None:
    """The interface that carries an address.

    >>> interface_of("10.0.0.2", [InterfaceAddress("lo", "127.0.0.1"), InterfaceAddress("eth0", "10.0.0.2")])
    'eth0'
    """
    wanted = _plain(address)
    return next((one.interface for one in addresses if _plain(one.address) == wanted), None)


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.strip("[]").partition("%")[0])


_ours: dict[str, str] = {}
"""Settings that this process made itself; an actor serves one plan after another."""


def _users(variable: str) -> bool:
    value = os.environ.get(variable)
    return bool(value) and value != _ours.get(variable)


def _set(variable: str, value: str | None) -> None:
    if _users(variable):
        return
    if value is None:
        os.environ.pop(variable, None)
        _ours.pop(variable, None)
    else:
        os.environ[variable] = _ours[variable] = value


def host_addresses() -> list[InterfaceAddress]:
    """All IPv4 and IPv6 addresses of this host's interfaces."""
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        InterfaceAddress(name, one.address)
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in families
    ]


# Notice a host that has fallen silent: it has lost its network or its power, so that nothing ends its connections.
#
# A kernel sends again for a quarter of an hour what nobody acknowledges, and asks after an idle connection once in two
# hours. So whoever waits for a device there would wait until ``train.message_timeout_s``, or until Ray has given the
# node up and then some. A thread looks each second when this host last heard from the kernels of the others, on any of
# the connections that there are, and ends those to one that was silent for ``SILENT_S``. Everybody who waits on them
# then fails as if the device had died, and recovery begins.
#
# It is the kernel that answers: a process that is stopped, computes for long or reads nothing makes no host silent, and
# of a slow link one acknowledgement on one of the connections is enough. The time limits of TCP would not do: that of
# ``TCP_USER_TIMEOUT`` ends the connection to a process that is stopped and whose buffer is full, however often its
# kernel answers; and that of keep-alive probes does not count while anything is on its way.

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
                self._addresses.add(str(_plain(address)))
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
                    if (address := str(_plain(connection.getpeername()[0]))) not in self._addresses:
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
