"""Changes that make steps shorter, each predicted from the measured times.

Two kinds of change are compared. Mending a cause where it is (a disturbed device, late data, a slow link): the replay
says what that gains. And another plan, which is simulated with the measured times beside the present one: another cut,
order, schedule, micro-batch size, place of the gradient sums or of the norm. The difference of the two simulations is
taken off the measured step, so that what neither of them knows of stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any

from raypipe.cost.divided_head import as_divided
from raypipe.cost.profile import LayerProfile, Profile
from raypipe.cost.sizes import times_at
from raypipe.cost.stages import frozen_stages, stage_costs
from raypipe.errors import ScheduleError, SpecError
from raypipe.explain.causes import Explanation
from raypipe.explain.replay import Cause, Replay
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.plan.cut.layers import cut_layers
from raypipe.plan.online.better_order import Running, better_plan, runs_ahead, step_seconds
from raypipe.plan.online.calibrate import fit_costs
from raypipe.plan.plan import Plan, build_schedule
from raypipe.schedule import SCHEDULES
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.live_activations import peak_activations

SAME_MEMORY = ("1f1b", "zb-h1")
"""Schedules of one stage a device that never hold more activations than 1F1B; the others are only tried if they fit."""
SPLIT = {"zb-h1"}
LARGEST = 20_000
"""Tasks of a step above which no other plans are simulated."""
WORTH = 0.005
"""Share of a step that a change has to gain to be named."""

ADVICE: dict[Cause, str] = {
    "straggler": "free device {device} of what slows it down, or replace it: it takes longer than it should",
    "data": "read the samples ahead: device {device} waits for its data (data.num_workers, faster storage)",
    "host": "give device {device}'s process a free core: its host starts tasks late",
    "link": "a faster link {device}, or narrower messages (parallel.wire_dtype: bfloat16)",
    "sync": "a faster network for gradient sums, or narrower sums (parallel.reduce_dtype: bfloat16)",
    "gather": "a faster network for gathers, or fewer of them (parallel.gather, parallel.shard)",
    "recompute": "keep the activations (parallel.recompute: none) where memory allows it",
    "norm": "let updates run ahead of the global norm (parallel.update: optimistic)",
}
"""What to do about a cause where it is."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change and what it would gain."""

    what: str
    predicted_step_s: float
    gain: float
    """Share of the measured step."""
    mends: str
    """The cause it is about."""
    keys: dict[str, Any] = field(default_factory=dict)
    """Job keys to set, or the plan's ``cut`` and ``program``; empty where it is nothing of either."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields of ``best_change``."""
        return {
            "change": self.what,
            "predicted_step_s": self.predicted_step_s,
            "gain": self.gain,
            "mends": self.mends,
            "set": self.keys,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedPlan:
    """The plan behind the measured steps, for changes of it."""

    plan: Plan
    batch: int
    """``train.batch``."""
    clips: bool
    """Whether updates need the global norm."""
    layer_s: tuple[float, ...] | None = None
    """Seconds of each layer by the profile, of which only the proportions count; None if there is none."""
    profile: Profile | None = None
    """The profile itself, for a model with frozen layers; None if there is none of this model."""


def changes(found: Explanation, replay: Replay, planned: ExplainedPlan | None) -> list[Change]:
    """Return all changes that are worth it, best first.

    Without ``planned``, only what mends causes where they are.
    """
    every = [*_mends(found)]
    if planned is not None and len(replay.waits.graph.tasks) <= LARGEST:
        every += _plans(found, replay, planned)
    best: dict[str, Change] = {}
    for change in sorted(every, key=lambda c: c.predicted_step_s):
        best.setdefault(change.what, change)
    return [change for change in best.values() if change.gain >= WORTH]


def _mends(found: Explanation) -> Iterator[Change]:
    for lost in found.causes:
        if lost.cause in ADVICE and lost.seconds > 0:
            where = "(every one)" if lost.device is None else lost.device
            what = ADVICE[lost.cause].format(device=where)
            keys = {"recompute": "none"} if lost.cause == "recompute" else {}
            keys |= {"update": "optimistic"} if lost.cause == "norm" else {}
            yield _change(found, what, lost.what_if_step_s, lost.cause, {f"parallel.{k}": v for k, v in keys.items()})


def _change(found: Explanation, what: str, step_s: float, mends: str, keys: dict[str, Any]) -> Change:
    step_s = max(step_s, 0.0)
    return Change(what, step_s, 1.0 - step_s / found.step_s if found.step_s else 0.0, mends, keys)


def _plans(found: Explanation, replay: Replay, planned: ExplainedPlan) -> Iterator[Change]:
    """Other plans, simulated with the measured times."""
    plan, of = planned.plan, replay.of
    if of.schedule.versions != "flush":
        return
    costs = fit_costs([of.timeline(step) for step in of.steps])
    ahead = of.norm == "optimistic"
    now = step_seconds(of.schedule, costs, planned.clips, ahead)

    def change(what: str, seconds: float, mends: str, keys: dict[str, Any]) -> Change:
        return _change(found, what, found.step_s - (now - seconds), mends, keys)

    cut = _other_cut(replay, planned, costs, ahead)
    if cut is not None and cut[1] < now:
        layers = [len(stage) for stage in cut[0]]
        present = [len(stage) for stage in plan.cut]
        frozen = () if planned.profile is None else frozen_stages(planned.profile, cut[0])
        order = plan.order() if frozen == plan.frozen else None
        moved = Plan.of(plan.parallel, cut[0], planned.batch, order, frozen)
        keys = {"program": moved.program} if moved.program != plan.program else {}
        yield change(
            f"another cut: stages of {_words(layers)} layers instead of {_words(present)}",
            cut[1],
            "imbalance",
            {"cut": [list(stage) for stage in cut[0]], **keys},
        )
    try:
        swap = better_plan(Running(plan, of.schedule, ahead), planned.batch, planned.clips, costs)
    except ScheduleError:
        swap = None
    if swap is not None and swap.gain > 0:
        yield change(f"another order: {swap.change}", swap.predicted_s, "warm-up", {"parallel.replan": True})
    for other, its_costs, what in _other_shapes(planned, costs):
        parallel = plan.parallel.model_copy(update=other)
        seconds = _seconds(parallel, its_costs, planned, of.schedule)
        if seconds is not None:
            keys = {f"parallel.{k}": getattr(parallel, k) for k in ("schedule", "microbatch")}
            yield change(what, seconds, "warm-up", keys)


def _other_cut(replay: Replay, planned: ExplainedPlan, costs: CostTable, ahead: bool) -> tuple[Cut, float] | None:
    """The best cut for the measured times, with its simulated step.

    None where stages are not runs of layers, or some are frozen and there is no profile: no backward of their layers
    was timed.
    """
    plan, schedule = planned.plan, replay.of.schedule
    cut = tuple(map(tuple, plan.cut))
    if len(cut) < 2 or [layer for stage in cut for layer in stage] != list(range(sum(map(len, cut)))):
        return None
    if planned.layer_s is not None and len(planned.layer_s) != sum(map(len, cut)):
        return None
    speed, per_copy = _speeds(replay), schedule.replicas // plan.parallel.replicas
    placement = schedule.placement[:per_copy]
    if planned.profile is not None and not all(layer.trained for layer in planned.profile.layers):
        cuts = RecutFrozen(planned.profile, plan, schedule, costs, speed, planned.batch)

        def frozen_step_s(other: Cut) -> float:
            left = cuts.schedule_of(other)
            return inf if left is None else step_seconds(left, cuts.costs_of(other), planned.clips, ahead)

        best, seconds = better_cut(cut, cuts.layer_s, placement, frozen_step_s)
        return None if best == cut else (best, seconds)
    if schedule.rules.frozen:
        return None
    shares = layer_shares(cut, planned.layer_s)
    undisturbed = [
        (f + b + w) / v for f, b, w, v in zip(costs.forward, costs.input_grad, costs.weight_grad, speed, strict=True)
    ]
    layer_s = [undisturbed[s] * shares[layer] for s, stage in enumerate(cut) for layer in stage]

    def step_s(other: Cut) -> float:
        return step_seconds(schedule, costs_of_cut(costs, cut, other, shares, speed), planned.clips, ahead)

    best, seconds = better_cut(cut, layer_s, placement, step_s)
    return None if best == cut else (best, seconds)


def _speeds(replay: Replay) -> list[float]:
    """Per stage, how many times as long as undisturbed the devices take that hold it."""
    measured, base = [0.0] * replay.of.schedule.stages, [0.0] * replay.of.schedule.stages
    for k, one in enumerate(replay.steps):
        for i, task in enumerate(replay.waits.graph.tasks):
            if task.mbs:
                measured[task.stage] += float(one.work[i])
                base[task.stage] += float(replay.base[k, i])
    return [m / b if b > 0 else 1.0 for m, b in zip(measured, base, strict=True)]


def _other_shapes(planned: ExplainedPlan, costs: CostTable) -> Iterator[tuple[dict[str, Any], CostTable, str]]:
    """Yield another schedule or micro-batch size as keys of ``parallel``, costs of its tasks, and what it changes."""
    parallel = planned.plan.parallel
    if parallel.schedule not in SCHEDULES or parallel.recompute not in ("none", "full"):
        return
    for name in SAME_MEMORY:
        if name != parallel.schedule and parallel.chunks == 1 and parallel.shard == "none":
            if any(costs.weight_grad[1:]) or name not in SPLIT:
                own, how = costs, ""
            else:  # measured as one task; two halves are the best guess
                half = tuple(b / 2 for b in costs.input_grad)
                own = replace(costs, input_grad=half, weight_grad=half, attention_grad=())
                how = ", if input and weight gradients take equally long"
            yield {"schedule": name}, own, f"schedule {name} instead of {parallel.schedule}{how}"
    for size in (parallel.microbatch // 2, parallel.microbatch * 2):
        if size >= 1 and size != parallel.microbatch:
            factor = size / parallel.microbatch
            compute = ("forward", "input_grad", "weight_grad", "recompute", "attention", "attention_grad")
            scaled: dict[str, Any] = {k: tuple(t * factor for t in getattr(costs, k)) for k in compute}
            what = f"micro-batches of {size} instead of {parallel.microbatch}, if tasks take as long per sample"
            yield {"microbatch": size}, replace(costs, **scaled), what


def _seconds(other: ParallelSpec, costs: CostTable, planned: ExplainedPlan, present: Schedule) -> float | None:
    """Simulate the step of a plan with other keys; None if there is none, or its fullest device holds more than now."""
    try:
        plan = Plan.of(other, planned.plan.cut, planned.batch, frozen=present.rules.frozen)
        schedule = build_schedule(plan, planned.batch)
        share = other.microbatch / planned.plan.parallel.microbatch
        if max(peak_activations(schedule)) * share > max(peak_activations(present)) * (1 + 1e-9):
            return None
        ahead = runs_ahead(other, planned.clips, schedule, costs)
        return step_seconds(schedule, costs, planned.clips, ahead)
    except ScheduleError:
        return None


def _words(counts: list[int]) -> str:
    """As ``3, 3, 2``; of many the first ones."""
    return ", ".join(map(str, counts[:8])) + (", ..." if len(counts) > 8 else "")


# Find a better cut for a measured step: the same stages on the same devices, borders moved layer by layer.


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
    result = [0.0] * sum(map(len, cut))
    for layers in cut:
        own = [1.0 if weights is None else weights[layer] for layer in layers]
        total = sum(own)
        for layer, weight in zip(layers, own, strict=True):
            result[layer] = weight / total if total > 0 else 1.0 / len(layers)
    return result


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

    rows: dict[str, Any] = {name: moved(getattr(costs, name)) for name in BY_LAYERS}
    return replace(costs, **rows)


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
        result = min(timed, key=lambda cut: timed[cut])
        if timed[result] >= timed[best] * (1 - 1e-9):
            break
        best = result
    return best, timed[best]


def _neighbours(cut: Cut) -> list[Cut]:
    """The cuts that differ by one border that is one layer further to the left or to the right."""
    result = []
    for s, (left, right) in enumerate(pairwise(cut)):
        if len(left) > 1:
            result.append((*cut[:s], left[:-1], (left[-1], *right), *cut[s + 2 :]))
        if len(right) > 1:
            result.append((*cut[:s], (*left, right[0]), right[1:], *cut[s + 2 :]))
    return result


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
        as_divided(profile, plan.parallel),
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
        result = {"forward": forward, "recompute": factor(costs.recompute[s], predicted.recompute[s], forward)}
        if any(task.kind == "W" for task in self.schedule.tasks()):
            for name in ("input_grad", "weight_grad"):
                result[name] = factor(getattr(costs, name)[s], getattr(predicted, name)[s], forward)
            return result | {"joint": result["input_grad"]}
        both = (costs.input_grad[s] + costs.weight_grad[s], predicted.input_grad[s] + predicted.weight_grad[s])
        return result | dict.fromkeys(("input_grad", "weight_grad", "joint"), factor(*both, forward))

    @property
    def layer_s(self) -> list[float]:
        """Undisturbed seconds of each layer for one micro-batch, there and back."""
        times = [times_at(layer, self.plan.parallel.microbatch) for layer in self.profile.layers]
        first = next((i for i, layer in enumerate(self.profile.layers) if layer.trained), 0)
        return [t.forward + (t.joint if i >= first else 0.0) for i, t in enumerate(times)]

    def costs_of(self, cut: Cut) -> CostTable:
        """Return the costs of a cut; messages and sums of gradients as measured."""
        result = profiled_costs(self.profile, self.plan, self.schedule, cut)
        speed = self.speed
        scaled: dict[str, Any] = {
            n: tuple(t * v for t, v in zip(getattr(result, n), speed, strict=True)) for n in BY_LAYERS
        }
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
