"""Several models on one pipeline: what a model does not share with the others changes places between two calls.

A slot is a model's own values of all trained parameters (of all weights, or of the adapters over frozen ones), with the
gradients that have added up and the optimizer's state. Those of one slot are in the stages at a time. Each device
changes them by itself when the next call is for another slot, by pointers, and no device waits for another: calls of
several models follow one another as those of one model do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.gradients import StageKey
from raypipe.runtime.update.optimizer import updated_tensor


class _Held(NamedTuple):
    """What a slot has of one parameter."""

    values: Tensor
    master: Tensor
    """What the optimizer updates: ``values``, or their master weights."""
    gradient: Tensor | None
    state: dict[str, Any] | None
    """The optimizer's; None before the first update."""


class Slots:
    """The slots of one device.

    Args:
        modules: its stage replicas, whose parameters have the values of the slot that runs.
        optimizers: one for each.
        executor: runs them.
    """

    def __init__(
        self,
        modules: Mapping[StageKey, StageModule],
        optimizers: Mapping[StageKey, torch.optim.Optimizer],
        executor: Executor,
    ) -> None:
        self._modules, self._optimizers, self._executor = modules, optimizers, executor
        self._away: dict[int, dict[tuple[StageKey, str], _Held]] = {}
        self._here: int | None = None

    def use(self, slot: int) -> None:
        """Run on a slot from now on; a new one begins with the values that are there, and nothing else."""
        if slot == self._here:
            return
        if self._here is not None:
            self._away[self._here] = self._take_out()
        found = self._away.pop(slot, None)
        for key, module in self._modules.items():
            optimizer = self._optimizers[key]
            for name, p in module.trained.items():
                master = updated_tensor(optimizer, p)
                if found is not None:
                    held = found[key, name]
                    master.data, p.data, p.grad = held.master, held.values, held.gradient
                    if held.state is not None:
                        optimizer.state[master] = held.state
                elif self._here is not None:
                    p.data = p.data.clone()
                    if master is not p:
                        master.data = master.data.clone()
        self._executor.casts.drop()
        self._here = slot

    def free(self, slot: int) -> None:
        """Give up what a slot has."""
        if slot == self._here:
            self._take_out()
            self._here = None
        self._away.pop(slot, None)

    def _take_out(self) -> dict[tuple[StageKey, str], _Held]:
        found = {}
        for key, module in self._modules.items():
            optimizer = self._optimizers[key]
            for name, p in module.trained.items():
                master = updated_tensor(optimizer, p)
                found[key, name] = _Held(p.data, master.data, p.grad, optimizer.state.pop(master, None))
            self._executor.sync.drop(key)
        return found
