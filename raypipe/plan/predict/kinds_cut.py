"""Cuts for clusters with several kinds of device: slow devices get little work, small ones what they can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from raypipe.cost.hosts import Placed
from raypipe.cost.kinds import capacities
from raypipe.cost.memory import DeviceMemory, kept_bytes, parameter_bytes
from raypipe.cost.profile import Profile
from raypipe.cost.sizes import times_at
from raypipe.errors import ScheduleError
from raypipe.job.train_spec import TrainSpec
from raypipe.plan.candidate import Candidate
from raypipe.plan.cut.exact import cut_uneven
from raypipe.plan.predict.form import Form
from raypipe.plan.predict.prediction import Cut

ROUNDS = 4
"""Times that a cut is measured and made again until it fits: what is alive depends a little on the cut itself."""


@dataclass(slots=True)
class KindsCut:
    """Cuts for one job on one cluster."""

    profile: Profile
    train: TrainSpec
    memory_with: Callable[[Candidate, Cut], tuple[DeviceMemory, ...]]
    """The memory of each device of a copy with this cut."""
    _cuts: dict[object, Cut] = field(default_factory=dict)

    def of(self, c: Candidate, form: Form) -> Cut:
        """Return the cut with the fastest slowest stage, each stage as slow as the slowest device that holds it.

        With ``balance: memory``, the fastest of those that fit each device's memory; where none does, the fastest. That
        takes a device that holds one stage only.
        """
        within = c.balance == "memory"
        plain = replace(c, recompute="none", sync="lazy") if within else None
        key = (form.placement, c.replicas, c.microbatch, plain)
        if key not in self._cuts:
            costs = self._costs(c, form)
            result = _cut(costs, None)
            assert result is not None
            self._cuts[key] = result if plain is None else self._within(plain, costs, result)
        return self._cuts[key]

    def _costs(self, c: Candidate, form: Form) -> list[list[float]]:
        """Per stage, the seconds of each layer for one micro-batch, there and back."""
        profile = self.profile
        placed = Placed.of(form.placement, c.replicas, profile.placed, c.innermost)
        by_kind = []
        for kind in profile.kinds:
            times = [times_at(layer, c.microbatch) for layer in kind.layers]
            by_kind.append([t.forward + t.joint for t in times])
        return [
            [max(layer) for layer in zip(*(by_kind[kind] for kind in placed.kinds((stage,))), strict=True)]
            for stage in range(form.stages)
        ]

    def _within(self, c: Candidate, costs: Sequence[Sequence[float]], fastest: Cut) -> Cut:
        """Return the fastest cut that fits, as far as known from what was alive with the cut before."""
        profile, train = self.profile, self.train
        each = parameter_bytes(profile.dtype, train.optimizer, train.momentum)
        state = _before([each.held(layer.parameters, layer.trained) for layer in profile.layers])
        kept = _before([kept_bytes(layer, c.microbatch, split=not c.form.joint) for layer in profile.layers])
        most = capacities(profile, c.stages, c.replicas)
        cut = fastest
        for _ in range(ROUNDS):
            try:
                memory = self.memory_with(c, cut)
            except ScheduleError:
                return fastest
            if all(device.total <= limit for device, limit in zip(memory, most, strict=True)):
                return cut
            fits = []
            for device, layers, limit in zip(memory, cut, most, strict=True):
                own = slice(layers.start, layers.stop)
                alive = device.in_flight / max(_run(kept, own), 1.0)
                rest = device.total - device.in_flight - _run(state, own)
                need = (state[None, :] - state[:, None]) + alive * (kept[None, :] - kept[:, None]) + rest
                fits.append(need <= limit)
            result = _cut(costs, fits)
            if result is None or result == cut:
                return fastest
            cut = result
        return cut


def _cut(costs: Sequence[Sequence[float]], fits: Sequence[NDArray[np.bool_]] | None) -> Cut | None:
    starts = cut_uneven(costs, fits)
    if starts is None:
        return None
    return tuple(range(a, b) for a, b in pairwise((*starts, len(costs[0]))))


def _before(values: Sequence[float]) -> NDArray[np.float64]:
    return np.array([0.0, *accumulate(values)])


def _run(before: NDArray[np.float64], own: slice) -> float:
    return float(before[own.stop] - before[own.start])
