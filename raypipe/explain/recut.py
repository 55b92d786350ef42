"""Find a better cut for a measured step: the same stages on the same devices, borders moved layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

from raypipe.cost.profile import LayerProfile, Profile
from raypipe.cost.sizes import times_at
from raypipe.cost.stages import frozen_stages, stage_costs
from raypipe.errors import ScheduleError, SpecError
from raypipe.plan.cut.layers import cut_layers
from raypipe.plan.plan import Plan, build_schedule
from raypipe.schedule import SCHEDULES
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule

Cut = tuple[tuple[int, ...], ...]
"""Per stage, the layers it holds."""
BY_LAYERS = ("forward", "input_grad", "weight_grad", "recompute", "update", "attention", "attention_grad")
"""Costs that go with the layers of a stage."""
MOST_MOVES = 200
"""Cuts that are timed."""


def layer_shares(cut: Cut, weights: Sequence[float] | None) -> list[float]:
    """Return the share of its stage's time that each layer takes: as ``weights`` say, or else all alike.

    >>> layer_shares(((0, 1, 2), (3,)), [1.0, 1.0, 2.0, 5.0])
    [0.25, 0.25, 0.5, 1.0]
    """
    found = [0.0] * sum(map(len, cut))
    for layers in cut:
        own = [1.0 if weights is None else weights[layer] for layer in layers]
        total = sum(own)
        for layer, weight in zip(layers, own, strict=True):
            found[layer] = weight / total if total > 0 else 1.0 / len(layers)
    return found


def costs_of_cut(
    costs: CostTable, present: Cut, other: Cut, shares: Sequence[float], speed: Sequence[float]
) -> CostTable:
    """Return the costs of another cut, from those measured with the present one.

    Args:
        costs: measured, per stage.
        present: the cut they were measured with.
        other: the cut to cost.
        shares: each layer's share of its present stage.
        speed: per stage, how many times as long as an undisturbed device the one that holds it takes.
    """
    at = {layer: s for s, layers in enumerate(present) for layer in layers}

    def moved(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(
            speed[s] * sum(values[at[layer]] / speed[at[layer]] * shares[layer] for layer in layers)
            for s, layers in enumerate(other)
        )

    return replace(costs, **{name: moved(getattr(costs, name)) for name in BY_LAYERS})


def better_cut(
    present: Cut, layer_s: Sequence[float], placement: Sequence[Sequence[int]], step_s: Callable[[Cut], float]
) -> tuple[Cut, float]:
    """Return the cut with the shortest step that moving borders finds, and its step in seconds.

    Args:
        present: where to start, beside the cut that is best by ``layer_s`` alone; a chain of runs of layers.
        layer_s: seconds of each layer for one micro-batch, on an undisturbed device.
        placement: device of every stage, one row per replica of one data-parallel copy.
        step_s: the simulated step of a cut.
    """
    starts = [present]
    with suppress(SpecError):  # what it refuses is no reason not to move borders
        starts.append(tuple(map(tuple, cut_layers(layer_s, placement).stages)))
    timed = {cut: step_s(cut) for cut in dict.fromkeys(starts)}
    best = min(timed, key=lambda cut: timed[cut])
    while len(timed) < MOST_MOVES:
        for cut in _neighbours(best):
            if cut not in timed:
                timed[cut] = step_s(cut)
        found = min(timed, key=lambda cut: timed[cut])
        if timed[found] >= timed[best] * (1 - 1e-9):
            break
        best = found
    return best, timed[best]


def _neighbours(cut: Cut) -> list[Cut]:
    """The cuts that differ by one border that is one layer further to the left or to the right."""
    found = []
    for s, (left, right) in enumerate(pairwise(cut)):
        if len(left) > 1:
            found.append((*cut[:s], left[:-1], (left[-1], *right), *cut[s + 2 :]))
        if len(right) > 1:
            found.append((*cut[:s], (*left, right[0]), right[1:], *cut[s + 2 :]))
    return found


# Other cuts of a model with frozen layers, costed by its profile.
#
# Measured stages do not say what their layers would take in other stages: a frozen stage before the first trained one
# has no backward to measure, and a trained one no more than the sum over its layers. So the profile's times of every
# layer are scaled until the present stages take what was measured, and cuts are costed as the planner costs them; each
# has the schedule that is left by its own frozen stages.


def profiled_costs(profile: Profile, plan: Plan, schedule: Schedule, cut: Cut | None = None) -> CostTable:
    """Return what a profile says of the stages of a plan, or of another cut of it.

    Args:
        profile: of the plan's model.
        plan: what runs.
        schedule: its step over all devices.
        cut: the plan's own, if None.
    """
    per_copy = schedule.replicas // plan.parallel.replicas
    split = any(task.kind == "W" for task in schedule.tasks())
    return stage_costs(
        profile,
        plan.cut if cut is None else cut,
        plan.parallel.microbatch,
        schedule.placement[:per_copy],
        copies=plan.parallel.replicas,
        innermost=plan.parallel.innermost,
        size=float(schedule.size),
        slices=schedule.rules.slices,
        split=split,
    )


@dataclass(slots=True)
class RecutFrozen:
    """The cuts of a running plan, with what their steps would cost."""

    profile: Profile
    plan: Plan
    schedule: Schedule
    """The step that runs, over all devices."""
    costs: CostTable
    """Measured."""
    speed: list[float]
    """Per stage, how many times as long as an undisturbed device the one that holds it takes."""
    batch: int
    """``train.batch``."""
    _schedules: dict[tuple[int, ...], Schedule | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plain = self.profile.model_copy(update={"task_overhead_s": 0.0})  # it is among what was measured
        predicted = profiled_costs(plain, self.plan, self.schedule)
        layers = list(plain.layers)
        for s, own in enumerate(self.plan.cut):
            factors = self._factors(predicted, s)
            for i in own:
                layers[i] = _scaled(layers[i], factors)
        self.profile = plain.model_copy(update={"layers": tuple(layers)})
        self._schedules[self.schedule.rules.frozen] = self.schedule

    def _factors(self, predicted: CostTable, s: int) -> dict[str, float]:
        """By kind of time, what was measured of a stage over what the profile says; the forward's if there is none."""

        def factor(measured: float, said: float, default: float) -> float:
            return measured / said / self.speed[s] if measured > 0 and said > 0 else default

        costs = self.costs
        forward = factor(costs.forward[s], predicted.forward[s], 1.0)
        found = {"forward": forward, "recompute": factor(costs.recompute[s], predicted.recompute[s], forward)}
        if any(task.kind == "W" for task in self.schedule.tasks()):
            for name in ("input_grad", "weight_grad"):
                found[name] = factor(getattr(costs, name)[s], getattr(predicted, name)[s], forward)
            return found | {"joint": found["input_grad"]}
        both = (costs.input_grad[s] + costs.weight_grad[s], predicted.input_grad[s] + predicted.weight_grad[s])
        return found | dict.fromkeys(("input_grad", "weight_grad", "joint"), factor(*both, forward))

    @property
    def layer_s(self) -> list[float]:
        """Undisturbed seconds of each layer for one micro-batch, there and back."""
        times = [times_at(layer, self.plan.parallel.microbatch) for layer in self.profile.layers]
        first = next((i for i, layer in enumerate(self.profile.layers) if layer.trained), 0)
        return [t.forward + (t.joint if i >= first else 0.0) for i, t in enumerate(times)]

    def costs_of(self, cut: Cut) -> CostTable:
        """Return the costs of a cut; messages and sums of gradients as measured."""
        found = profiled_costs(self.profile, self.plan, self.schedule, cut)
        scaled = {n: tuple(t * v for t, v in zip(getattr(found, n), self.speed, strict=True)) for n in BY_LAYERS}
        return replace(self.costs, **scaled)

    def schedule_of(self, cut: Cut) -> Schedule | None:
        """Return the step that a cut's frozen stages leave; None for a fixed order of other tasks."""
        frozen = frozen_stages(self.profile, cut)
        if frozen not in self._schedules:
            self._schedules[frozen] = None
            if self.plan.parallel.schedule in SCHEDULES:
                try:
                    other = Plan.of(self.plan.parallel, cut, self.batch, frozen=frozen)
                    self._schedules[frozen] = build_schedule(other, self.batch)
                except ScheduleError:
                    pass
        return self._schedules[frozen]


def _scaled(layer: LayerProfile, factors: dict[str, float]) -> LayerProfile:
    times = {
        size: t.model_copy(update={name: factor * getattr(t, name) for name, factor in factors.items()})
        for size, t in layer.times.items()
    }
    return layer.model_copy(update={"times": times})
