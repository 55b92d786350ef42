"""Make the plan of a job: from its ``parallel`` keys, by searching an order, or by profiling and planning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raypipe.errors import SpecError
from raypipe.job.requested_schedule import Cut, base_schedule, is_file, named_layers
from raypipe.job.spec import JobSpec
from raypipe.launch.branch_plan import branch_plan
from raypipe.launch.job_model import JobModel
from raypipe.launch.prepared import Planned
from raypipe.observe.run_log import RunLog
from raypipe.plan.plan import Plan, build_schedule
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.search import Found, search
from raypipe.search.placements import placed
from raypipe.simulate.engine import simulate

if TYPE_CHECKING:
    from raypipe.models import LayeredModel


def make_plan(job: JobSpec) -> Plan:
    """Make the plan of a job that leaves no choice to the planner; see ``planned_as_asked``."""
    return planned_as_asked(job, JobModel(job)).plan


def planned_as_asked(job: JobSpec, model: JobModel) -> Planned:
    """Cut the model for the schedule that the job asks for, and build and verify the step.

    Raises:
        SpecError: there are more stages than layers, or the schedule cannot train tied parameters of this cut.
        ScheduleError: the schedule does not exist for this shape.
    """
    from raypipe.models import split_layers

    layers = model.declared
    parallel = job.parallel
    if isinstance(parallel.recompute, tuple):
        numbers = named_layers(parallel.recompute, layers.names)
        parallel = parallel.model_copy(update={"recompute": numbers})
    order: Schedule | None = None
    if parallel.placement == "branches":
        plan = branch_plan(job, layers)
        return Planned(job, model, plan, build_schedule(plan, job.train.batch))
    if parallel.schedule == "auto":
        placement = placed(parallel.placement, parallel.shape(job.train.batch))
        orders: dict[tuple[float, ...], Found] = {}

        def searched(flops: Sequence[float]) -> Found:
            key = tuple(flops)
            orders[key] = orders.get(key) or _searched(job, placement, key)
            return orders[key]

        cut = split_layers(layers, placement, lambda flops: searched(flops).makespan * max(flops))
        order = replace(searched([_flops(layers, part) for part in cut]).schedule, name="auto")
    else:
        schedule = base_schedule(parallel, job.train.batch)
        cut = split_layers(layers, schedule.placement, lambda flops: simulate(schedule, _costs(flops)).makespan)
        if schedule.versions == "stash":
            _check_tied(layers, cut)
    # A file is run as it is written, with the gradients that frozen stages need not as well.
    frozen = () if is_file(parallel.schedule) else layers.frozen_stages(cut)
    plan = Plan.of(parallel, cut, job.train.batch, order, frozen)
    return Planned(job, model, plan, build_schedule(plan, job.train.batch))


def _check_tied(layers: LayeredModel, cut: Cut) -> None:
    """Refuse tied parameters across stages: PipeDream updates each stage separately, so the copies would diverge."""
    stage_of = {layer: stage for stage, part in enumerate(cut) for layer in part}
    for group in layers.tied:
        if len({stage_of[layer] for layer, _ in group.parameters}) > 1:
            raise SpecError(
                "model",
                f"pipedream updates stages at different times: copies of {group.name} would differ",
                "use schedule: pipedream-2bw, or a model without tied parameters",
            )


def _searched(job: JobSpec, placement: tuple[tuple[int, ...], ...], flops: tuple[float, ...]) -> Found:
    """Search the order of ``schedule: auto``; its times are in units of the largest stage's forward."""
    shape = job.parallel.shape(job.train.batch)
    costs = _costs([f / max(flops) for f in flops])
    return search(placement, shape.microbatches, costs, memory_limit=shape.memory_limit)


def _flops(layers: LayeredModel, part: Sequence[int]) -> float:
    return float(sum(layers.flops[i] for i in part))


def _costs(times: Sequence[float]) -> CostTable:
    """Return what is known of a model that was never measured: B and W take as long as F each."""
    zeros = (0.0,) * len(times)
    each = tuple(times)
    return CostTable(forward=each, input_grad=each, weight_grad=each, recompute=zeros, all_reduce=zeros, update=zeros)


def with_plan(job: JobSpec, plan: Plan) -> JobSpec:
    """Return the job with a plan's ``parallel`` keys, checked with the plan's program: nothing is generated again.

    Raises:
        SpecError: the keys break a rule of job files.
        ScheduleError: the program cannot be read.
    """
    keys = {**job.model_dump(), "parallel": plan.parallel.model_dump()}
    return JobSpec.model_validate(keys, context=plan.one_copy())


def planned_by_measuring(
    job: JobSpec, model: JobModel, directory: Path, dashboard_port: int | None, say: Callable[[str], None]
) -> Planned:
    """Start Ray, profile the devices and choose a plan; the decision is logged in the run's events.

    Raises:
        SpecError: no plan fits, or there is no device to profile.
        RunError: a device died while it was profiled.
    """
    from raypipe.plan.decision_json import as_json
    from raypipe.profiling.profile_and_plan import profile_and_plan

    if model.declared.batch_statistics and "microbatch" not in job.parallel.given:
        say(
            "note: this model's loss depends on the micro-batch size (batch norm, or a loss of its own), which the "
            "planner chooses; set parallel.microbatch to fix it"
        )
    decision = profile_and_plan(job, directory, directory / "data", dashboard_port, say)
    fields = as_json(decision)
    log = RunLog(directory)
    log.event("planned", **{key: fields[key] for key in ("candidates", "searched", "timed", "seconds")})
    log.close()
    plan = decision.plan
    return Planned(with_plan(job, plan), model, plan, build_schedule(plan, job.train.batch))
