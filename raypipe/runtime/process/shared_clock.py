"""One clock for all devices of a run: rank 0's monotonic clock, which every other host converts its times to.

Every host counts its monotonic seconds from its own boot, so times of two hosts cannot be compared. On each host other
than rank 0's, one process, the leader, asks rank 0 for the time (NTP's exchange, RFC 5905); the answer gives the
offset of its clock to within half of the round trip. The leader keeps asking during training, because clocks drift,
and shares the offset with the other processes of its host, so that differences of times on one host stay exact.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import socketserver
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from raypipe.errors import TransportError
from raypipe.runtime.transport.same_host.ring import answer, call, give, listen, shared_file, take

DRIFT = 15e-6
"""How far two clocks may drift apart, in seconds per second: RFC 5905's PHI."""
FIRST = 32
"""Number of exchanges at the start."""
EVERY_S = 1.0
"""Interval of later exchanges."""
KEPT = 32
"""Number of newest estimates that are kept."""
_TIME = struct.Struct("=d")

Local = Callable[[], float]


class Estimate(NamedTuple):
    """The clock offset that one exchange measured."""

    offset_s: float
    """Rank 0's clock minus this host's."""
    error_s: float
    """Largest error of ``offset_s``: half of the round trip."""
    at: float
    """When it was measured, on this host's clock."""


def exchange(local: Local, ask: Callable[[], float]) -> Estimate:
    """Ask the other clock once, and estimate its offset."""
    before = local()
    theirs = ask()
    after = local()
    return Estimate(theirs - (before + after) / 2, (after - before) / 2, after)


def best(estimates: Iterable[Estimate], now: float) -> Estimate:
    """Return the estimate with the smallest error bound now: a short round trip, and recent.

    >>> quick, slow = Estimate(5.0, 0.001, 0.0), Estimate(5.3, 0.4, 100.0)
    >>> best([quick, slow], 100.0) is quick
    True
    """
    return min(estimates, key=lambda one: one.error_s + DRIFT * (now - one.at))


class SharedClock:
    """Converts this host's monotonic seconds to those of rank 0's clock and back."""

    def __init__(self, offset: ctypes.c_double | None = None, *opened: contextlib.AbstractContextManager[Any]) -> None:
        self._offset = ctypes.c_double() if offset is None else offset
        self._opened = opened

    @property
    def offset_s(self) -> float:
        """Rank 0's clock minus this host's."""
        return self._offset.value

    def shared(self, local: Any) -> Any:
        """Convert a time (or an array of times) of this host to rank 0's clock."""
        return local + self._offset.value

    def local(self, shared: float) -> float:
        """Convert a time of rank 0's clock to this host's."""
        return shared - self._offset.value

    def close(self) -> None:
        """Stop the clock's server or follower; the last offset stays in use."""
        self._offset = ctypes.c_double(self._offset.value)
        for one in self._opened:
            one.__exit__(None, None, None)
        self._opened = ()


class Store(Protocol):
    """The methods of ``torch.distributed.Store`` that are used here."""

    def set(self, key: str, value: str) -> None:
        """Publish a value."""

    def get(self, key: str) -> bytes:
        """Wait until a value is published, and return it."""


def open_clock(
    rank: int,
    nodes: Sequence[str],
    address: str,
    store: Store,
    run_id: str,
    local: Local = time.monotonic,
    timeout_s: float = 300.0,
) -> SharedClock:
    """Open the run's clock; every process of the run must call this.

    Args:
        rank: of the calling process.
        nodes: the host of each rank; the same in every call.
        address: IP address of rank 0's host.
        store: the store through which the processes coordinate.
        run_id: part of the name under which a leader listens.
        local: this host's clock.
        timeout_s: how long to wait for another process.

    Raises:
        TransportError: rank 0, or a process of this host, cannot be reached.
    """
    if len(set(nodes)) == 1:
        return SharedClock()
    if rank == 0:
        server = ClockServer(address, local)
        store.set("raypipe/clock", str(server.port))
        return SharedClock(None, server)
    if nodes[rank] == nodes[0]:
        return SharedClock()
    leader = nodes.index(nodes[rank])
    others = nodes.count(nodes[rank]) - 1
    name = f"{run_id}-{leader}-clock"
    if rank != leader:
        return SharedClock(_from_leader(name, leader, timeout_s))
    if not others:
        number = ctypes.c_double()
        return SharedClock(number, ClockFollower(address, int(store.get("raypipe/clock")), number, local, timeout_s))
    with listen(name) as listener:
        file = shared_file(_TIME.size)
        try:
            number = _map(file)
            follower = ClockFollower(address, int(store.get("raypipe/clock")), number, local, timeout_s)
            _to_others(listener, others, file, timeout_s)
        finally:
            os.close(file)
    return SharedClock(number, follower)


def _to_others(listener: socket.socket, others: int, file: int, timeout_s: float) -> None:
    for _ in range(others):
        connection = answer(listener, timeout_s)
        if connection is None:
            raise _no_answer("another process of this host", timeout_s)
        with connection, contextlib.suppress(OSError):  # one that has died meanwhile fails elsewhere
            give(connection, [file])


def _from_leader(name: str, leader: int, timeout_s: float) -> ctypes.c_double:
    connection = call(name, timeout_s)
    if connection is None:
        raise _no_answer(f"rank {leader}", timeout_s)
    with connection:
        try:
            (file,) = take(connection, 1, timeout_s)
        except OSError:
            raise _no_answer(f"rank {leader}", timeout_s) from None
    try:
        return _map(file)
    finally:
        os.close(file)


def _no_answer(who: str, timeout_s: float) -> TransportError:
    return TransportError("clocks", f"{who} did not answer within {timeout_s:g} s", "see that device's log")


def _map(file: int) -> ctypes.c_double:
    """Map a float64 into memory that processes share; writes are atomic because it is one aligned store."""
    return ctypes.c_double.from_buffer(mmap.mmap(file, _TIME.size))


class ClockServer(socketserver.ThreadingTCPServer):
    """Rank 0's side: answers every byte with its time. It reveals nothing else, so it needs no authentication."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: str, local: Local = time.monotonic) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.now = local
        super().__init__((address, 0), _Answer)
        self.port = int(self.server_address[1])
        self._thread = threading.Thread(target=self.serve_forever, name="raypipe-clock", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Answer(socketserver.BaseRequestHandler):
    server: ClockServer

    def handle(self) -> None:
        """Answer until the other side closes the connection."""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            while self.request.recv(1):
                self.request.sendall(_TIME.pack(self.server.now()))


class ClockFollower(contextlib.AbstractContextManager[None]):
    """A leader's side: a thread that keeps ``offset`` at the best estimate. Rank 0 has ``timeout_s`` to answer.

    Raises:
        TransportError: rank 0 does not answer.
    """

    def __init__(
        self, address: str, port: int, offset: ctypes.c_double, local: Local = time.monotonic, timeout_s: float = 300.0
    ) -> None:
        self._at, self._offset, self._local, self._timeout_s = (address, port), offset, local, timeout_s
        self._kept: deque[Estimate] = deque(maxlen=KEPT)
        self._closed = threading.Event()
        try:
            self._connection = self._connect()
            self._estimate(FIRST)
        except OSError as error:
            raise TransportError(
                "clocks",
                f"rank 0 does not answer at {address}, port {port}: {error}",
                "allow the cluster's nodes to connect to each other on all ports, as Ray itself and Gloo need it",
            ) from None
        self._thread = threading.Thread(target=self._follow, name="raypipe-clock", daemon=True)
        self._thread.start()

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._at, timeout=self._timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _ask(self) -> float:
        self._connection.sendall(b"?")
        answer = b""
        while len(answer) < _TIME.size:
            more = self._connection.recv(_TIME.size - len(answer))
            if not more:
                raise ConnectionError("the connection was closed")
            answer += more
        return float(_TIME.unpack(answer)[0])

    def _estimate(self, times: int) -> None:
        for _ in range(times):
            self._kept.append(exchange(self._local, self._ask))
        self._offset.value = best(self._kept, self._local()).offset_s

    def _follow(self) -> None:
        while not self._closed.wait(EVERY_S):
            try:
                self._estimate(1)
            except OSError:  # a lost connection costs accuracy but must not end the run
                self._connection.close()
                with contextlib.suppress(OSError):
                    self._connection = self._connect()
        self._connection.close()

    def __exit__(self, *_: object) -> None:
        self._closed.set()
