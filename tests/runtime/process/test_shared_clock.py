"""Hosts whose clocks began at other times agree on rank 0's, to within half of a round trip."""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from raypipe.errors import TransportError
from raypipe.runtime.process import shared_clock
from raypipe.runtime.process.shared_clock import (
    DRIFT,
    FIRST,
    ClockFollower,
    ClockServer,
    Estimate,
    SharedClock,
    best,
    exchange,
    open_clock,
)


@dataclass
class MemoryStore:
    """What the processes of a world tell each other, here threads."""

    values: dict[str, str] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, timeout=20)
            return self.values[key].encode()


@pytest.mark.parametrize(("there_s", "back_s"), [(0.001, 0.001), (0.0, 0.004), (0.003, 0.0)])
def test_an_exchange_is_off_by_half_a_round_trip_at_most(there_s, back_s) -> None:
    now = [50.0]

    def ask() -> float:
        now[0] += there_s
        theirs = now[0] + 700.0
        now[0] += back_s
        return theirs

    result = exchange(lambda: now[0], ask)
    assert result.at == 50.0 + there_s + back_s
    assert result.error_s == pytest.approx((there_s + back_s) / 2)
    assert abs(result.offset_s - 700.0) <= result.error_s + 1e-9


def test_an_old_exchange_gives_way_to_a_slower_one_once_clocks_may_have_drifted_further() -> None:
    quick, slow = Estimate(5.0, 0.001, 0.0), Estimate(5.1, 0.003, 100.0)
    assert best([quick, slow], 100.0) is quick
    later = Estimate(5.1, 0.003, 0.0021 / DRIFT)
    assert best([quick, later], later.at) is later


@pytest.mark.slow
def test_every_process_knows_rank_0s_clock(monkeypatch) -> None:
    """Five processes on three hosts; the two of a host have the same number, whoever measured it."""
    monkeypatch.setattr(shared_clock, "EVERY_S", 0.01)
    nodes, offsets = ["a", "b", "b", "c", "a"], {"a": 0.0, "b": 1000.0, "c": -1e6}
    store, clocks = MemoryStore(), [SharedClock() for _ in nodes]

    def come_up(rank: int) -> None:
        local = lambda: time.monotonic() + offsets[nodes[rank]]  # noqa: E731
        clocks[rank] = open_clock(rank, nodes, "127.0.0.1", store, "clocktest", local)

    threads = [threading.Thread(target=come_up, args=(rank,)) for rank in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    try:
        for rank, node in enumerate(nodes):
            assert clocks[rank].offset_s == pytest.approx(-offsets[node], abs=0.05), rank
        assert clocks[0].offset_s == clocks[4].offset_s == 0.0
        for _ in range(20):  # while it is measured again
            time.sleep(0.005)
            one, other = clocks[1].offset_s, clocks[2].offset_s
            assert one == other or one == clocks[1].offset_s or other == clocks[2].offset_s
        times = np.array([[1.0, 2.0]]) + offsets["b"]
        assert clocks[1].shared(times) == pytest.approx(np.array([[1.0, 2.0]]), abs=0.05)
        assert clocks[3].local(clocks[3].shared(17.0)) == 17.0
    finally:
        for clock in clocks:
            clock.close()
    assert clocks[1].offset_s == pytest.approx(-1000.0, abs=0.05)


def test_a_leader_that_is_not_there_is_named() -> None:
    with pytest.raises(TransportError, match=r"rank 1 did not answer within 0\.02 s"):
        open_clock(2, ["a", "b", "b"], "127.0.0.1", MemoryStore(), "clocktest", timeout_s=0.02)


def test_one_host_measures_nothing() -> None:
    clock = open_clock(1, ["a", "a"], "127.0.0.1", MemoryStore(), "unused")
    assert clock.offset_s == 0.0
    assert clock.shared(3.5) == 3.5


@pytest.mark.slow
def test_drift_is_followed(monkeypatch) -> None:
    monkeypatch.setattr(shared_clock, "EVERY_S", 0.005)
    monkeypatch.setattr(shared_clock, "DRIFT", 10.0)  # so much may these clocks drift: the newest exchange counts
    shift = [0.0]
    server = ClockServer("127.0.0.1", lambda: time.monotonic() + shift[0])
    offset = ctypes.c_double()
    with server, ClockFollower("127.0.0.1", server.port, offset):
        assert offset.value == pytest.approx(0.0, abs=0.05)
        shift[0] = 3.0
        _wait_for(lambda: abs(offset.value - 3.0) < 0.05)


@pytest.mark.slow
def test_a_lost_connection_is_made_again(monkeypatch) -> None:
    monkeypatch.setattr(shared_clock, "EVERY_S", 0.005)
    asked = [0]

    def now() -> float:
        asked[0] += 1
        return time.monotonic()

    server = ClockServer("127.0.0.1", now)
    offset = ctypes.c_double()
    with server, ClockFollower("127.0.0.1", server.port, offset) as _:
        _wait_for(lambda: asked[0] > FIRST + 3)
    with ClockServer("127.0.0.1", now) as server:
        follower = ClockFollower("127.0.0.1", server.port, offset)
        with follower:
            follower._connection.close()
            before = asked[0]
            _wait_for(lambda: asked[0] > before + 3)


@pytest.mark.slow
def test_a_rank_0_that_nobody_reaches_is_named() -> None:
    with ClockServer("127.0.0.1") as server:
        port = server.port
    with pytest.raises(TransportError, match=f"127.0.0.1, port {port}"):
        ClockFollower("127.0.0.1", port, ctypes.c_double())


def _wait_for(holds) -> None:
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)
