"""One clock for all devices of a run: rank 0's monotonic clock, as every other host knows it.

Every host counts its monotonic seconds from its own boot, so times of two hosts mean nothing to each other. Of each
other host one process, its leader, asks rank 0 for the time (NTP's exchange, RFC 5905): what it is off by, to within
half of the round trip. It goes on asking beside training, because clocks drift, and shares what it finds with its
host's other processes, so that times of one host keep their exact distances.
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
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from raypipe.errors import TransportError
from raypipe.runtime.transport.same_host.ring import directory

DRIFT = 15e-6
"""Seconds a second that two clocks may drift apart: RFC 5905's PHI."""
FIRST = 32
"""Exchanges at the start."""
EVERY_S = 1.0
"""Between two later ones."""
KEPT = 32
ANSWER_S = 30.0
"""Time rank 0 has to answer; its process may be stopped for a while."""
_TIME = struct.Struct("=d")

Local = Callable[[], float]


class Estimate(NamedTuple):
    """What one exchange says."""

    offset_s: float
    """Rank 0's clock minus this host's."""
    doubt_s: float
    """How far off that is at most: half of the round trip."""
    at: float
    """When it was, on this host's clock."""


def exchange(local: Local, ask: Callable[[], float]) -> Estimate:
    """Ask the other clock once."""
    before = local()
    theirs = ask()
    after = local()
    return Estimate(theirs - (before + after) / 2, (after - before) / 2, after)


def best(estimates: Iterable[Estimate], now: float) -> Estimate:
    """The one that is least in doubt now: a quick round trip, and not too long ago.

    >>> quick, slow = Estimate(5.0, 0.001, 0.0), Estimate(5.3, 0.4, 100.0)
    >>> best([quick, slow], 100.0) is quick
    True
    """
    return min(estimates, key=lambda one: one.doubt_s + DRIFT * (now - one.at))


class SharedClock:
    """Turns this host's monotonic seconds into those of rank 0's clock and back."""

    def __init__(self, offset: ctypes.c_double | None = None, *opened: contextlib.AbstractContextManager[Any]) -> None:
        self._offset = ctypes.c_double() if offset is None else offset
        self._opened = opened

    @property
    def offset_s(self) -> float:
        """Rank 0's clock minus this host's."""
        return self._offset.value

    def shared(self, local: Any) -> Any:
        """A time (or an array of times) of this host on rank 0's clock."""
        return local + self._offset.value

    def local(self, shared: float) -> float:
        """A time on rank 0's clock on this host's."""
        return shared - self._offset.value

    def close(self) -> None:
        """Stop answering or asking; the offset stays as it is."""
        self._offset = ctypes.c_double(self._offset.value)
        for one in self._opened:
            one.__exit__(None, None, None)
        self._opened = ()


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None:
        """Publish."""

    def get(self, key: str) -> bytes:
        """Wait for what is published."""

    def add(self, key: str, amount: int) -> int:
        """Count; returns the sum."""


def open_clock(
    rank: int, nodes: Sequence[str], address: str, store: Store, run_id: str, local: Local = time.monotonic
) -> SharedClock:
    """The run's clock. Every process of the run calls this with the same ``nodes``, the host of each rank.

    Args:
        address: of rank 0's host.
        store: where the processes tell each other what they need.
        run_id: names the run's files.
        local: this host's clock.

    Raises:
        TransportError: rank 0 can't be reached.
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
    path = directory() / f"raypipe-{run_id}-{leader}.clock"
    if rank != leader:
        store.get(f"raypipe/clock/{leader}")
        number = _map(path, create=False)
        if store.add(f"raypipe/clock/{leader}/opened", 1) == others:
            path.unlink(missing_ok=True)
        return SharedClock(number)
    number = _map(path, create=True) if others else ctypes.c_double()
    follower = ClockFollower(address, int(store.get("raypipe/clock")), number, local)
    store.set(f"raypipe/clock/{leader}", "measured")
    return SharedClock(number, follower)


def _map(path: Path, create: bool) -> ctypes.c_double:
    """A number in memory that processes share: one aligned store, seen whole or not at all."""
    fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    try:
        if create:
            os.ftruncate(fd, _TIME.size)
        return ctypes.c_double.from_buffer(mmap.mmap(fd, _TIME.size))
    finally:
        os.close(fd)


class ClockServer(socketserver.ThreadingTCPServer):
    """Rank 0's side: answers every byte with its time. It tells nothing else, so it asks nobody who they are."""

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
        """Until the other side leaves."""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            while self.request.recv(1):
                self.request.sendall(_TIME.pack(self.server.now()))


class ClockFollower(contextlib.AbstractContextManager[None]):
    """A leader's side: keeps ``offset`` at the best estimate, from a thread of its own."""

    def __init__(self, address: str, port: int, offset: ctypes.c_double, local: Local = time.monotonic) -> None:
        self._at, self._offset, self._local = (address, port), offset, local
        self._kept: deque[Estimate] = deque(maxlen=KEPT)
        self._closed = threading.Event()
        try:
            self._connection = self._connect()
            self._look(FIRST)
        except OSError as error:
            raise TransportError(
                "clocks", f"rank 0 does not answer at {address}, port {port}: {error}",
                "let the cluster's nodes connect to each other on all ports, as Ray itself and Gloo need it",
            ) from None  # fmt: skip
        self._thread = threading.Thread(target=self._follow, name="raypipe-clock", daemon=True)
        self._thread.start()

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._at, timeout=ANSWER_S)
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

    def _look(self, times: int) -> None:
        for _ in range(times):
            self._kept.append(exchange(self._local, self._ask))
        self._offset.value = best(self._kept, self._local()).offset_s

    def _follow(self) -> None:
        while not self._closed.wait(EVERY_S):
            try:
                self._look(1)
            except OSError:  # a lost connection costs accuracy, not the run
                self._connection.close()
                with contextlib.suppress(OSError):
                    self._connection = self._connect()
        self._connection.close()

    def __exit__(self, *_: object) -> None:
        self._closed.set()
