"""Norm and clip factor that stay on the device are those of the host; the device lags behind where a test says so."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypipe.runtime.process.clock import HostClock
from raypipe.runtime.update import norm as norms
from raypipe.runtime.update.norm import DeviceShares, clip_factor, norm_of
from raypipe.runtime.update.policy import Trained
from raypipe.runtime.update.updates import Updates
from raypipe.schedule.lowering.programs import Program
from tests.runtime.runs.one_device import TwoMembers


class Event:
    """Passed when ``done`` says so; ``waits`` counts how often the host waited."""

    done = True
    waits = 0

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return Event.done

    def synchronize(self) -> None:
        Event.waits += 1


class Work:
    def wait(self) -> None:
        pass


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> DeviceShares:
    def gather(out: torch.Tensor, own: torch.Tensor, group: object) -> Work:
        out.copy_(torch.cat([own, torch.tensor([16.0], dtype=torch.float64)]))
        return Work()

    monkeypatch.setattr(norms, "start_all_gather", gather)
    monkeypatch.setattr(Event, "done", True)
    monkeypatch.setattr(Event, "waits", 0)
    return DeviceShares(TwoMembers(), Event)  # type: ignore[arg-type]


@given(st.floats(0, 1e12), st.floats(1e-6, 1e6))
def test_the_factor_is_the_hosts(norm: float, limit: float) -> None:
    shares = DeviceShares(None)
    shares.start(torch.tensor(norm, dtype=torch.float64) ** 2)
    assert float(shares.factor(limit)) == pytest.approx(clip_factor(limit, norm), rel=1e-12)


def test_norms_that_are_no_numbers() -> None:
    shares = DeviceShares(None)
    for square, factor in ((math.nan, 1.0), (math.inf, 0.0)):
        shares.start(torch.tensor(square, dtype=torch.float64))
        assert float(shares.factor(1.0)) == factor


def test_alone_nothing_is_read_back() -> None:
    shares = DeviceShares(None)
    shares.start(torch.tensor(4.0, dtype=torch.float64))
    assert shares.ranks == 1
    assert shares.ready()
    assert shares.earlier() == []


def test_all_devices_add_one_list(two: DeviceShares) -> None:
    two.start(torch.tensor(9.0, dtype=torch.float64))
    assert two.ranks == 2
    assert float(two.factor(2.5)) == pytest.approx(0.5, rel=1e-6)
    assert norm_of(two.wait(lambda: False)) == 5.0


def test_norms_come_back_a_step_later_without_a_wait(two: DeviceShares) -> None:
    """What ``earlier`` returns depends on the number of steps alone, so all devices decide alike."""
    seen = []
    for share in (9.0, 0.0, 48.0):
        seen.append([norm_of(e) for e in two.earlier()])
        two.start(torch.tensor(share, dtype=torch.float64))
    assert seen == [[], [], [5.0]]
    assert Event.waits == 0
    Event.done = False
    assert not two.ready()
    assert norm_of(two.wait(lambda: False)) == 8.0
    assert Event.waits == 1


class Sync:
    """Gradients of which only the norm is asked for."""

    square = 0.0
    totals: ClassVar[dict[object, torch.Tensor]] = {}

    def norm_squared(self) -> torch.Tensor:
        return torch.tensor(self.square, dtype=torch.float64)

    def known_norm_squared(self, own: torch.Tensor) -> torch.Tensor:
        return own

    def drop(self, key: object) -> None:
        pass

    def begin_step(self, order: object) -> None:
        pass

    def finish(self, push: object, clock: object) -> dict[object, float]:
        return {}


@pytest.mark.parametrize("share", [math.nan, math.inf, 9.0])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_gpu_skips_an_update_that_its_host_does_not_know_of(
    kind: type[torch.optim.Optimizer], share: float, two: DeviceShares
) -> None:
    """The fused step takes the flag from the device; a step later it goes on as if that one had not been."""
    weights = [torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    mine, plain = (kind([p], lr=0.1, fused=True) for p in weights)

    sync = Sync()
    modules = {(0, 0): SimpleNamespace(statistics=[])}
    trained = Trained(modules, {(0, 0): mine}, sync, 1, lambda: False, HostClock(), lambda: None)  # type: ignore[arg-type]
    updates = Updates(trained, two, None, "wait", skips=True)
    program = Program(0, (), {}, frozenset(), frozenset())
    for step, square in enumerate((9.0, share, 9.0)):
        sync.square = square
        weights[0].grad = torch.full((3,), 1.0 if square == 9.0 else math.nan, dtype=torch.float64)
        updates.begin_step(program, step, 0.1)
        updates.before_updates(np.empty((0, 2)))
        updates.update((0, 0))
        if step != 1 or share == 9.0:
            weights[1].grad = torch.ones(3, dtype=torch.float64)
            plain.step()
    assert torch.equal(weights[0], weights[1])
    assert Event.waits == 0
