"""A device whose update can still be taken back finishes its step alone, or forgets it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from raypipe.errors import TransportError
from raypipe.runtime.process.clock import HostClock
from raypipe.runtime.update.collectives import Push
from raypipe.runtime.update.ledger import Ledger, Standing
from raypipe.runtime.update.policy import Trained
from raypipe.runtime.update.updates import Updates
from raypipe.schedule.lowering.programs import Program, RunAhead
from tests.runtime.runs.one_device import TwoMembers

KEY = (0, 0)
LIMIT, SQUARE = 1.0, 12.0
"""Of the norm, and the devices' sum of its square."""


class Sync:
    """One gradient of this device; another device has as much."""

    complete = False

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self.parameter, self.totals = parameter, dict[Any, Any]()

    def begin_step(self, order: object) -> None:
        self.parameter.grad = torch.full_like(self.parameter, 2.0)

    def finish(self, push: object, clock: object) -> dict[Any, float]:
        return {}

    def norm_squared(self) -> torch.Tensor:
        return torch.tensor(SQUARE, dtype=torch.float64)

    def known_norm_squared(self, share: torch.Tensor) -> torch.Tensor:
        return share

    def scale(self, factor: float) -> None:
        assert self.parameter.grad is not None
        self.parameter.grad.mul_(factor)

    def drop(self, key: object) -> None:
        self.parameter.grad = None

    def leave(self) -> list[Any]:
        return []


class Unheard(Ledger):
    """Another device has not said that its gradients are complete; it is lost when somebody waits for it."""

    def _send(self, numbers: Sequence[float]) -> None:
        self._work = self  # type: ignore[assignment]

    def is_completed(self) -> bool:
        return False

    def wait(self, push: Push | None = None) -> list[float]:
        if push is None:
            raise RuntimeError("connection closed")
        return super().wait(push)


def stopped(how: Literal["wait", "optimistic"], made: bool) -> tuple[Updates, torch.nn.Parameter]:
    """Updates that wait for the other device's share of the norm, and the parameter; ``made``: its U has run."""
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    modules: Any = {KEY: SimpleNamespace(statistics=[])}
    optimizers = {KEY: torch.optim.SGD([parameter], lr=0.1, momentum=0.9)}
    sync: Any = Sync(parameter)
    trained = Trained(modules, optimizers, sync, 1, lambda: False, HostClock(), lambda: None)
    updates = Updates(trained, Unheard(TwoMembers(), 0, 1), LIMIT, how)  # type: ignore[arg-type]
    updates.begin_step(Program(0, (), {}, frozenset(), frozenset(), ahead=RunAhead(1, {})), 0, 0.1)
    if how == "wait":
        with pytest.raises(TransportError, match="all devices' gradients"):
            updates.before_updates(np.empty((0, 2)))
    else:
        updates.before_updates(np.empty((0, 2)))
        assert updates.pending
        if made:
            updates.update(KEY)
            assert torch.equal(parameter, torch.full_like(parameter, 0.8))
        assert updates.commit(wait=False) is None, "the others have not said that their gradients are complete"
    updates.leave()
    assert updates.standing() == Standing(0, ready=True, agreed=False, begun=1)
    return updates, parameter


CASES: list[Any] = [("optimistic", True), ("optimistic", False), ("wait", False)]


@pytest.mark.parametrize(("how", "made"), CASES)
def test_a_step_is_finished_with_the_norms_of_all(how, made) -> None:
    updates, parameter = stopped(how, made)
    updates.finish_alone([SQUARE, SQUARE])
    clipped = 2.0 * LIMIT / (2 * SQUARE) ** 0.5
    assert torch.allclose(parameter, torch.full_like(parameter, 1.0 - 0.1 * clipped), rtol=1e-6)
    assert not updates.pending
    assert parameter.grad is None
    assert updates.standing().done == 1


@pytest.mark.parametrize(("how", "made"), CASES)
def test_a_step_is_forgotten(how, made) -> None:
    updates, parameter = stopped(how, made)
    updates.finish_alone(None)
    assert torch.equal(parameter, torch.ones_like(parameter))
    assert not updates.pending
    assert parameter.grad is None
    assert not updates.optimizers[KEY].state
