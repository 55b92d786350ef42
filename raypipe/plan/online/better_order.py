"""Find a faster plan for a running job from its measured task times, without moving a stage.

Between two steps, a device can switch to another program over the stages it holds. Four things can therefore change:
the order of tasks, where weight gradients fill idle time (ZeroPP section 4), when gradients are all-reduced, and
whether devices run ahead of the global gradient norm. None of them changes what a step computes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from raypipe.errors import ScheduleError
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.requested_schedule import is_file
from raypipe.plan.online.measured_steps import as_run
from raypipe.plan.plan import Plan, build_schedule, left_by_frozen
from raypipe.schedule import generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Rules, Schedule
from raypipe.schedule.live_activations import in_flight, peak_activations, recomputed_pairs
from raypipe.schedule.lowering.norm_policy import resolve
from raypipe.schedule.passes import insert_weights
from raypipe.schedule.passes.sync import BY_BUCKET, Sync
from raypipe.search import Objective, search
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import gains_ahead, period

BUDGET_S = 3.0
"""Seconds of search, which runs on the driver's CPU."""
PATIENCE = (0.25, 0.5, 0.75, 1.0)
"""Values of ``insert_weights``'s patience to try."""
OBJECTIVES: tuple[Objective, ...] = ("makespan", "period")
"""Objectives to search with: the makespan matters where updates wait for the global norm, the period elsewhere."""
SYNCS: tuple[Sync, ...] = ("lazy", "eager", "eager-opt")


class Running(NamedTuple):
    """A plan and the schedule that devices run for it."""

    plan: Plan
    schedule: Schedule
    """The whole step over all devices."""
    ahead: bool
    """Whether devices run ahead of the global norm."""


@dataclass(frozen=True, slots=True)
class Swap:
    """A proposal to replace the current plan."""

    target: Running
    change: str
    """What differs, for people."""
    current_s: float
    """Predicted step time of the current plan with the measured costs, in seconds."""
    predicted_s: float
    """Predicted step time of ``target``, in seconds."""

    @property
    def gain(self) -> float:
        """Fraction of the step time that the swap is predicted to save."""
        return 1.0 - self.predicted_s / self.current_s if self.current_s else 0.0


def runs_ahead(parallel: ParallelSpec, clips: bool, schedule: Schedule, costs: CostTable) -> bool:
    """Return whether devices should run ahead of the global norm."""
    return clips and resolve(parallel.update, lambda: gains_ahead(schedule, costs)) == "optimistic"


def running_of(plan: Plan, batch: int, clips: bool) -> Running:
    """Build the schedule of a plan for which no costs were measured yet; the schedule is always a new object.

    Raises:
        ScheduleError: the plan does not fit ``train.batch``.
    """
    schedule = build_schedule(plan, batch)
    return Running(plan, schedule, runs_ahead(plan.parallel, clips, schedule, CostTable.even(schedule.stages)))


def step_seconds(schedule: Schedule, costs: CostTable, clips: bool, ahead: bool) -> float:
    """Predict the seconds from one step to the next for a schedule of all devices, updates included."""
    schedule = as_run(schedule)
    if schedule.versions == "flush" and clips and not ahead:
        return simulate(schedule, costs).makespan
    return period(schedule, costs, norm="optimistic" if ahead and schedule.versions == "flush" else "none")


def better_plan(present: Running, batch: int, clips: bool, costs: CostTable, tried: Collection[str] = ()) -> Swap:
    """Find the fastest plan with the measured costs; the current plan, with gain 0, if nothing beats it.

    A searched schedule (``auto``) may get any order within the same memory. A named schedule stays in its family: it is
    generated again for the measured costs, or it keeps its forwards and backwards and moves its weight gradients.

    Args:
        present: the current plan.
        batch: ``train.batch``.
        clips: whether gradients are clipped by their global norm.
        costs: measured costs, in seconds.
        tried: ``key`` of the plans to exclude.

    Raises:
        ScheduleError: the costs have another number of stages.
    """
    parallel = present.plan.parallel
    now = step_seconds(present.schedule, costs, clips, present.ahead)
    best = Swap(present, "nothing", now, now)
    if present.schedule.versions != "flush":
        return best
    limits, flight = _limits(parallel, present.schedule), in_flight(present.schedule)
    # Activations of a device differ in size where stages recompute, or where a free placement's are uneven: then no
    # stage may have more in flight than now, which ``peak_activations``, that counts them, does not see.
    uneven = parallel.placement == "free" or bool(recomputed_pairs(present.schedule))
    for candidate, change in _candidates(present.plan, batch, _with_recompute(present.schedule, costs)):
        if key(candidate) in tried:
            continue
        try:
            schedule = build_schedule(candidate, batch)
        except ScheduleError:
            continue
        if any(a > b for a, b in zip(peak_activations(schedule), limits, strict=True)):
            continue
        if uneven and any(count > flight.get(at, 0) for at, count in in_flight(schedule).items()):
            continue
        ahead = runs_ahead(parallel, clips, schedule, costs)
        time = step_seconds(schedule, costs, clips, ahead)
        if time < best.predicted_s * (1 - 1e-9):
            best = Swap(Running(candidate, schedule, ahead), change, now, time)
    return best


def key(plan: Plan) -> str:
    """Identify a plan by what can change while a job runs."""
    return f"{plan.parallel.sync} {plan.program}"


def _with_recompute(schedule: Schedule, costs: CostTable) -> CostTable:
    """Add the mean recompute time to each stage's input gradient, because orders are generated without R tasks."""
    recomputed = [0] * schedule.stages
    total = [0] * schedule.stages
    for task in schedule.tasks():
        recomputed[task.stage] += len(task.mbs) * (task.kind == "R")
        total[task.stage] += len(task.mbs) * (task.kind == "F")
    extra = [r * a / max(1, n) for r, a, n in zip(costs.recompute, recomputed, total, strict=True)]
    return replace(costs, input_grad=tuple(b + x for b, x in zip(costs.input_grad, extra, strict=True)))


def _limits(parallel: ParallelSpec, present: Schedule) -> tuple[float, ...]:
    """Live activations that each device may hold: the larger of today's peak and the job's ``memory_limit``."""
    return tuple(max(peak, parallel.memory_limit or 0.0) for peak in peak_activations(present))


def _candidates(plan: Plan, batch: int, costs: CostTable) -> Iterator[tuple[Plan, str]]:
    """Candidate plans and what they change: every order, the current one included, with every ``sync``."""
    several = build_schedule(plan, batch).replicas > 1
    for order, change in [(None, ""), *_orders(plan, batch, costs)]:
        for sync in SYNCS if several and plan.parallel.sync not in BY_BUCKET else (plan.parallel.sync,):
            changes = [change] if change else []
            changes += [f"gradient all-reduce {sync}"] if sync != plan.parallel.sync else []
            changed = plan if order is None and sync == plan.parallel.sync else plan.remade(batch, order, sync=sync)
            yield changed, ", ".join(changes or ["when updates are made"])


def _orders(plan: Plan, batch: int, costs: CostTable) -> Iterator[tuple[Schedule, str]]:
    """Other orders of one pipeline's tasks on the same devices, each with a description of the change."""
    parallel, present = plan.parallel, plan.order()
    split = any(task.kind == "W" for task in present.tasks())
    if parallel.schedule == "auto":
        for objective in OBJECTIVES:
            result = search(
                present.placement,
                present.microbatches,
                costs,
                graph=present.graph,
                memory_limit=_limits(parallel, present),
                split=split,
                objective=objective,
                budget_s=BUDGET_S / len(OBJECTIVES),
                starts=[present],
                rules=Rules(frozen=present.rules.frozen),
            )
            yield replace(result.schedule, name=present.name), "order searched again"
        return
    bases = [present]
    if not is_file(parallel.schedule):
        fresh = generate(parallel.schedule, parallel.shape(batch), costs)
        fresh = left_by_frozen(fresh, present.rules.frozen, parallel.shard == "none")
        if fresh.orders != present.orders:
            yield fresh, f"{parallel.schedule} generated for the measured times"
            bases.append(fresh)
    if split:
        for base in bases:
            for patience in PATIENCE:
                yield (
                    insert_weights(base, costs, patience, _limits(parallel, present)),
                    "weight gradients moved into idle time",
                )
