"""What a running job could do better, going by the task times it measures, without moving a stage.

Between two steps a device can take up another program over the stages it holds. So what may change is the order of
tasks, where weight gradients fill idle time (ZeroPP section 4), when gradients are summed over replicas, and whether
devices run ahead of the global gradient norm. None of it changes what a step computes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from raypipe.errors import ScheduleError
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.requested_schedule import is_file
from raypipe.plan.online.measured_steps import as_run
from raypipe.plan.plan import Plan, build_schedule
from raypipe.schedule import generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.forms.text import from_text, to_text
from raypipe.schedule.ir import Schedule
from raypipe.schedule.live_activations import in_flight, peak_activations, recomputed_pairs
from raypipe.schedule.lowering.norm_policy import resolve
from raypipe.schedule.passes import insert_weights
from raypipe.schedule.passes.sync import Sync
from raypipe.search import Objective, search
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import gains_ahead, period

BUDGET_S = 3.0
"""Seconds of search; it shares the driver's processor time."""
PATIENCE = (0.25, 0.5, 0.75, 1.0)
"""How eagerly weight gradients are put into idle time; all are tried."""
OBJECTIVES: tuple[Objective, ...] = ("makespan", "period")
"""What an order is searched for: the first where updates wait for a global norm, else the second; close at any rate."""
SYNCS: tuple[Sync, ...] = ("lazy", "eager", "eager-opt")


class Running(NamedTuple):
    """A plan as devices run it."""

    plan: Plan
    schedule: Schedule
    """The whole step over all devices."""
    ahead: bool
    """Devices run ahead of the global norm."""


@dataclass(frozen=True, slots=True)
class Swap:
    """What to run instead of the present plan."""

    target: Running
    change: str
    """What is different, in words."""
    current_s: float
    """Predicted step of the present plan on the measured costs."""
    predicted_s: float
    """The same of this one."""

    @property
    def gain(self) -> float:
        """Predicted share of the step that is saved."""
        return 1.0 - self.predicted_s / self.current_s if self.current_s else 0.0


def runs_ahead(parallel: ParallelSpec, clips: bool, schedule: Schedule, costs: CostTable) -> bool:
    """Whether devices should run ahead of the global norm."""
    return clips and resolve(parallel.update, lambda: gains_ahead(schedule, costs)) == "optimistic"


def running_of(plan: Plan, batch: int, clips: bool) -> Running:
    """A plan as devices begin to run it, before any cost has been measured; its schedule is a new object.

    Raises:
        ScheduleError: the plan does not suit ``train.batch``.
    """
    schedule = build_schedule(plan, batch)
    return Running(plan, schedule, runs_ahead(plan.parallel, clips, schedule, CostTable.even(schedule.stages)))


def step_seconds(schedule: Schedule, costs: CostTable, clips: bool, ahead: bool) -> float:
    """Predicted time from step to step of a whole schedule, with its updates."""
    schedule = as_run(schedule)
    if schedule.versions == "flush" and clips and not ahead:
        return simulate(schedule, costs).makespan
    return period(schedule, costs, norm="optimistic" if ahead and schedule.versions == "flush" else "none")


def better_plan(present: Running, batch: int, clips: bool, costs: CostTable, tried: Collection[str] = ()) -> Swap:
    """The plan that the measured costs make the fastest; the present one (gain 0) if nothing beats it.

    A schedule that was searched for may get any order within the same memory; one with a name stays of its family:
    it is generated anew for the measured costs, or keeps its forwards and backwards and moves its weight gradients.

    Args:
        present: what runs now.
        batch: ``train.batch``.
        clips: gradients are clipped by their global norm.
        costs: as measured, in seconds.
        tried: ``key`` of plans not to come back to.

    Raises:
        ScheduleError: costs for another number of stages.
    """
    parallel = present.plan.parallel
    now = step_seconds(present.schedule, costs, clips, present.ahead)
    best = Swap(present, "nothing", now, now)
    if present.schedule.versions != "flush":
        return best
    limits, flight = _limits(parallel, present.schedule), in_flight(present.schedule)
    remakes = bool(recomputed_pairs(present.schedule))
    for candidate, change in _candidates(present.plan, batch, _with_recompute(present.schedule, costs)):
        if key(candidate) in tried:
            continue
        try:
            schedule = build_schedule(candidate, batch)
        except ScheduleError:
            continue
        if any(a > b for a, b in zip(peak_activations(schedule), limits, strict=True)):
            continue
        if remakes and any(count > flight.get(at, 0) for at, count in in_flight(schedule).items()):
            continue  # what is kept until an R grows with these, however little lives after it
        ahead = runs_ahead(parallel, clips, schedule, costs)
        time = step_seconds(schedule, costs, clips, ahead)
        if time < best.predicted_s * (1 - 1e-9):
            best = Swap(Running(candidate, schedule, ahead), change, now, time)
    return best


def key(plan: Plan) -> str:
    """Tells plans apart that differ in what can change while a job runs."""
    return f"{plan.parallel.sync} {plan.order}"


def _with_recompute(schedule: Schedule, costs: CostTable) -> CostTable:
    """Backwards that take as long as what is computed again right before them: orders are made without R tasks."""
    again = [0] * schedule.stages
    every = [0] * schedule.stages
    for task in schedule.tasks():
        again[task.stage] += len(task.mbs) * (task.kind == "R")
        every[task.stage] += len(task.mbs) * (task.kind == "F")
    extra = [r * a / max(1, n) for r, a, n in zip(costs.recompute, again, every, strict=True)]
    return replace(costs, input_grad=tuple(b + x for b, x in zip(costs.input_grad, extra, strict=True)))


def _limits(parallel: ParallelSpec, present: Schedule) -> tuple[float, ...]:
    """Activations each device may hold: as many as now, which it has room for, or what the job allows."""
    return tuple(max(peak, parallel.memory_limit or 0.0) for peak in peak_activations(present))


def _candidates(plan: Plan, batch: int, costs: CostTable) -> Iterator[tuple[Plan, str]]:
    """Orders, each with every way to sum gradients over replicas; the present order too, ahead of the norm or not."""
    several = build_schedule(plan, batch).replicas > 1
    for order, change in [(None, ""), *_orders(plan, batch, costs)]:
        changed = plan if order is None else plan.model_copy(update={"order": to_text(order)})
        for sync in SYNCS if several else (plan.parallel.sync,):
            words = [change] if change else []
            words += [f"gradient sums {sync}"] if sync != plan.parallel.sync else []
            parallel = plan.parallel.model_copy(update={"sync": sync})
            yield changed.model_copy(update={"parallel": parallel}), ", ".join(words or ["when updates are made"])


def _orders(plan: Plan, batch: int, costs: CostTable) -> Iterator[tuple[Schedule, str]]:
    """Other orders of one pipeline's tasks on the same devices."""
    parallel = plan.parallel
    shape = parallel.shape(batch)
    text = plan.order
    present = from_text(text, "plan: order") if text is not None else generate(parallel.schedule, shape)
    split = any(task.kind == "W" for task in present.tasks())
    if parallel.schedule == "auto":
        for objective in OBJECTIVES:
            found = search(
                present.placement, present.microbatches, costs, memory_limit=_limits(parallel, present), split=split,
                objective=objective, budget_s=BUDGET_S / len(OBJECTIVES), starts=[present],
            )  # fmt: skip
            yield replace(found.schedule, name=present.name), "order searched anew"
        return
    familiar = [present]
    if not is_file(parallel.schedule):
        fresh = generate(parallel.schedule, shape, costs)
        if fresh.orders != present.orders:
            yield fresh, f"{parallel.schedule} generated for the measured times"
            familiar.append(fresh)
    if split:
        for base in familiar:
            for patience in PATIENCE:
                yield (
                    insert_weights(base, costs, patience, _limits(parallel, present)),
                    "weight gradients moved into idle time",
                )
