"""Changes that make steps shorter, each predicted from the measured times.

Two kinds of change are compared. Mending a cause where it is (a disturbed device, late data, a slow link): the replay
says what that gains. And another plan, which is simulated with the measured times beside the present one: another cut,
order, schedule, micro-batch size, place of the gradient sums or of the norm. The difference of the two simulations is
taken off the measured step, so that what neither of them knows of stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from raypipe.cost.profile import Profile
from raypipe.cost.stages import frozen_stages
from raypipe.errors import ScheduleError
from raypipe.explain.causes import Explanation, Lost
from raypipe.explain.recut import Cut, RecutFrozen, better_cut, costs_of_cut, layer_shares
from raypipe.explain.replay import Cause, Replay
from raypipe.job.parallel_spec import ParallelSpec
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
PREDICTED_BY_PLAN: frozenset[Cause] = frozenset({"imbalance", "warm-up"})
"""Causes that only another plan mends."""


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
            what = ADVICE[lost.cause].format(device=_place(lost))
            keys = {"recompute": "none"} if lost.cause == "recompute" else {}
            keys |= {"update": "optimistic"} if lost.cause == "norm" else {}
            yield _change(found, what, lost.what_if_step_s, lost.cause, {f"parallel.{k}": v for k, v in keys.items()})


def _place(lost: Lost) -> str:
    return str(lost.device) if lost.device is not None else "(every one)"


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
            scaled = {k: tuple(t * factor for t in getattr(costs, k)) for k in compute}
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
