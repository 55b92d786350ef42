"""Make the plan of a job: from its ``parallel`` keys, by searching an order, or by profiling and planning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raypipe.errors import SpecError
from raypipe.graph.dims import count
from raypipe.graph.subgraph_work import captured_work
from raypipe.job.field_types import arithmetic
from raypipe.job.recompute_layers import Cut, named_layers
from raypipe.job.requested_schedule import base_schedule, is_file
from raypipe.job.spec import JobSpec
from raypipe.launch.prepared import JobModel, Planned
from raypipe.observe.run_log import log_event
from raypipe.partition.this_machine import this_machine
from raypipe.plan.branches.arranged import LayerCosts
from raypipe.plan.branches.choose import Branches, choose_branches
from raypipe.plan.plan import Plan, build_schedule
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.search import Found, search
from raypipe.search.placements import placed
from raypipe.simulate.engine import simulate

if TYPE_CHECKING:
    from raypipe.job.cluster import ClusterSpec
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
    log_event(directory, "planned", **{key: fields[key] for key in ("candidates", "searched", "timed", "seconds")})
    plan = decision.plan
    return Planned(with_plan(job, plan), model, plan, build_schedule(plan, job.train.batch))


def branch_plan(job: JobSpec, model: LayeredModel) -> Plan:
    """Cut a model's graph of layers for the devices of one data-parallel copy, and search its order.

    Costs are estimates for cores of this machine.

    Raises:
        SpecError: the model is no captured one, or has fewer pieces than devices.
    """
    parallel = job.parallel
    costs = layer_costs(job, model, this_machine(job.train.dtype, 1))
    found = choose_branches(costs, parallel.stages, parallel.shape(job.train.batch).microbatches)
    return plan_of(job, found, model.frozen_stages(found.arranged.cut))


def plan_of(job: JobSpec, found: Branches, frozen: Collection[int] = ()) -> Plan:
    """Return stages on devices with their order as the plan of a job."""
    return Plan.of(job.parallel, found.arranged.cut, job.train.batch, replace(found.schedule, name="auto"), frozen)


def layer_costs(job: JobSpec, model: LayeredModel, machine: ClusterSpec) -> LayerCosts:
    """Estimate what a micro-batch of a job's model costs on a machine's devices, from its operations.

    Messages go over the links inside a host, or where a host has a single device, between hosts.

    Raises:
        SpecError: the model has no graph of operations.
    """
    from raypipe.models.captured import CapturedModel

    if not isinstance(model, CapturedModel):
        raise SpecError("parallel.placement", "the model is a chain without branches", "use line")
    device, kind = machine.device, arithmetic(job.train.dtype)
    link = machine.inside if machine.devices_per_host > 1 or machine.hosts == 1 else machine.between
    shares = {str(name): share for name, share in device.efficiency_by_dtype.items()}
    peaks = {str(name): peak for name, peak in device.peak_tflops.items()}
    rates = (
        peaks[kind] * 1e12 * shares.get(kind, device.efficiency),
        device.memory_gb_s * 1e9,
        device.layer_overhead_us * 1e-6,
    )
    samples = job.parallel.microbatch
    works = [each.work for each in captured_work(model.graph, model.sharding, model.sizes(1))]
    tensors = model.tensors(range(len(model.results)), samples)
    sizes = [float(count(t.shape, {}) * t.dtype.itemsize) for t in tensors]
    return LayerCosts(
        results=model.results,
        result_bytes=tuple(sizes),
        gradient_bytes=tuple(size * t.differentiable for size, t in zip(sizes, tensors, strict=True)),
        forward=tuple(w.forward.seconds(samples, *rates) for w in works),
        input_grad=tuple(w.input_grad.seconds(samples, *rates) for w in works),
        weight_grad=tuple(w.weight_grad.seconds(samples, *rates) for w in works),
        latency_s=link.latency_us * 1e-6,
        bytes_per_s=link.bandwidth_gb_s * 1e9,
    )
