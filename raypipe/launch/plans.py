"""The plan of a job: from its ``parallel`` keys, by searching an order, or by profiling and planning.

Or one that exists: from a file that the user gives, or from the directory of the run to resume.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.cost.gpt_work import RAYPIPE
from raypipe.cost.kernels import Kernels
from raypipe.errors import RequestError, ScheduleError, SpecError
from raypipe.graph.dims import count
from raypipe.graph.liveness import check_order, stage_ends
from raypipe.graph.subgraph_work import captured_work
from raypipe.job.parallel_spec import JOBS_OWN
from raypipe.job.requested_schedule import Cut, base_schedule, is_file, named_layers
from raypipe.job.spec import JobSpec
from raypipe.launch.prepared import JobModel, Planned
from raypipe.observe.run_dir import set_aside
from raypipe.observe.run_log import log_event
from raypipe.partition.this_machine import this_machine
from raypipe.plan.branches import Branches, LayerCosts, choose_branches
from raypipe.plan.plan import Plan, build_schedule, load_plan
from raypipe.schedule import generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.vocabulary import costs_of
from raypipe.schedule.ir import Rules, Schedule
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
    from raypipe.models import DividedHead, split_encoder, split_layers

    layers = model.declared
    parallel = job.parallel
    if isinstance(parallel.recompute, tuple):
        numbers = named_layers(parallel.recompute, layers.names)
        parallel = parallel.model_copy(update={"recompute": numbers})
    order: Schedule | None = None
    if parallel.placement == "branches":
        plan = branch_plan(job, layers)
        return Planned(job, model, plan, build_schedule(plan, job.train.batch))
    if parallel.placement == "encoder":
        placement = placed(parallel.placement, parallel.shape(job.train.batch))
        cut, costs = split_encoder(layers, placement)
        order = replace(_searched(job, placement, costs, layers.frozen_stages(cut)).schedule, name="auto")
    elif parallel.schedule == "auto":
        placement = placed(parallel.placement, parallel.shape(job.train.batch))
        orders: dict[tuple[float, ...], Found] = {}

        def searched(flops: Sequence[float]) -> Found:
            key = tuple(flops)
            orders[key] = orders.get(key) or _searched(job, placement, _costs([f / max(key) for f in key]))
            return orders[key]

        cut = split_layers(layers, placement, lambda flops: searched(flops).makespan * max(flops))
        order = replace(searched([float(sum(layers.flops[i] for i in part)) for part in cut]).schedule, name="auto")
    else:
        schedule = base_schedule(parallel, job.train.batch)
        cut = split_layers(layers, schedule.placement, lambda flops: simulate(schedule, _costs(flops)).makespan)
        if isinstance(layers, DividedHead):
            blocks = [float(sum(layers.flops[i] for i in part)) for part in cut[: parallel.stages]]
            costs = costs_of(blocks, layers.head_flops)
            order = generate(parallel.schedule, parallel.shape(job.train.batch), costs)
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


def _searched(
    job: JobSpec, placement: tuple[tuple[int, ...], ...], costs: CostTable, frozen: tuple[int, ...] = ()
) -> Found:
    """Search the order of ``schedule: auto``."""
    shape, rules = job.parallel.shape(job.train.batch), Rules(frozen=frozen)
    return search(placement, shape.microbatches, costs, memory_limit=shape.memory_limit, rules=rules)


def _costs(times: Sequence[float]) -> CostTable:
    """Return what is known of a model that was never measured: B and W take as long as F each."""
    each = tuple(times)
    return CostTable(forward=each, input_grad=each, weight_grad=each)


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
    planned = with_plan(job, plan)
    if plan.parallel.vocabulary == "split":  # the run has other layers than those that were measured
        model = JobModel(planned)
    return Planned(planned, model, plan, build_schedule(plan, job.train.batch))


def branch_plan(job: JobSpec, model: LayeredModel) -> Plan:
    """Cut a model's graph of layers for the devices of one data-parallel copy, and search its order.

    Costs are estimates for cores of this machine.

    Raises:
        SpecError: the model is no captured one, or has fewer pieces than devices.
    """
    parallel = job.parallel
    costs = layer_costs(job, model, this_machine(job.train.dtype, 1))
    result = choose_branches(costs, parallel.stages, parallel.shape(job.train.batch).microbatches)
    return plan_of(job, result, model.frozen_stages(result.arranged.cut))


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
    link = machine.inside if machine.devices_per_host > 1 or machine.hosts == 1 else machine.between
    samples = job.parallel.microbatch
    works = [each.work for each in captured_work(model.graph, model.sharding, model.sizes(1))]
    kernels = Kernels.of(machine.device, job.train.dtype, RAYPIPE, grouped=any(work.experts for work in works))
    tensors = model.tensors(range(len(model.results)), samples)
    sizes = [float(count(t.shape, {}) * t.dtype.itemsize) for t in tensors]
    return LayerCosts(
        results=model.results,
        result_bytes=tuple(sizes),
        gradient_bytes=tuple(size * t.differentiable for size, t in zip(sizes, tensors, strict=True)),
        forward=tuple(kernels.seconds(w.forward, samples) for w in works),
        input_grad=tuple(kernels.seconds(w.input_grad, samples, backward=True) for w in works),
        weight_grad=tuple(kernels.seconds(w.weight_grad, samples, backward=True) for w in works),
        latency_s=link.latency_us * 1e-6,
        bytes_per_s=link.bandwidth_gb_s * 1e9,
    )


def given_plan(job: JobSpec, plan_file: Path, beside: Mapping[str, Any], say: Callable[[str], None]) -> Planned:
    """Read the plan for a job from a file.

    Args:
        job: the job.
        plan_file: the plan file.
        beside: ``parallel`` keys given together with the plan; they must agree with it.
        say: called with notes for the user.

    Raises:
        SpecError: the file is not a plan, or the plan is for another model or contradicts ``beside`` or the job's
            rules.
        ScheduleError: the plan's schedule cannot run, or does not fit ``train.batch``.
    """
    plan = _beside(load_plan(plan_file), beside, plan_file)
    try:
        job = with_plan(job, plan)
    except SpecError as error:
        if not error.where.startswith("parallel"):
            raise  # the error is in the job, not in the plan
        raise SpecError(f"{plan_file}: {error.where}", error.why, error.fix) from None
    except ScheduleError as error:
        raise _in_file(error, plan_file) from None
    model = JobModel(job)
    schedule = _checked_schedule(plan, job, model.declared, plan_file)
    return Planned(job, model, _checked_prediction(plan, job, plan_file, say), schedule)


def kept_plan(job: JobSpec, directory: Path, say: Callable[[str], None] = lambda _: None) -> Planned | None:
    """Read the plan of the run to resume if it was chosen or searched, because planning again could give another plan.

    Args:
        job: the job.
        directory: the run directory.
        say: called with notes for the user.

    Returns:
        The plan, or None if there is none to keep: the job's keys or batch now need another one, or the file is
        damaged. ``say`` reports a plan that does not fit or is damaged.

    Raises:
        SpecError: the plan was made for another model.
    """
    parallel = job.parallel
    if not (parallel.auto or parallel.schedule == "auto" or parallel.replans):
        return None
    path = directory / "plan.json"
    if not path.exists():
        return None
    try:
        plan = load_plan(path)
    except SpecError as error:  # checkpoints do not depend on the plan, so the run can still resume
        say(f"note: {error.where} {error.why}; renamed it {set_aside(path).name}; planning the run again")
        return None
    # Replanning may have changed ``sync`` together with the order (plan.online.better_order).
    asked = plan.parallel.model_copy(update={"sync": job.parallel.sync})
    if not (job.parallel.allows(plan.parallel) if job.parallel.auto else asked == job.parallel):
        return None
    try:
        job = with_plan(job, plan)
        schedule = build_schedule(plan, job.train.batch)
    except RequestError as error:
        say(f"note: {path} does not fit this job, so a new plan is made: {error.where} {error.why}")
        return None
    return Planned(job, JobModel(job), _checked_prediction(plan, job, path, say), schedule)


def _beside(plan: Plan, given: Mapping[str, Any], plan_file: Path) -> Plan:
    """Apply the ``parallel`` keys that the job decides even if a plan is given, and check all others.

    Raises:
        SpecError: a given key differs from the plan's decision.
    """
    own = {key: value for key, value in given.items() if key in JOBS_OWN}
    for key, value in given.items():
        decided = getattr(plan.parallel, key, None)
        if key not in own and decided != value:
            raise SpecError(
                f"--set parallel.{key}",
                f"{value} contradicts {plan_file}, which decides {decided}",
                "leave out one of them; to plan with it: raypipe autoconfigure JOB.yaml --set ... -o PLAN.json",
            )
    return plan.model_copy(update={"parallel": plan.parallel.model_copy(update=own)})


def _checked_prediction(plan: Plan, job: JobSpec, plan_file: Path, say: Callable[[str], None]) -> Plan:
    """Drop the plan's prediction if it is of another job or of the plan before it was edited.

    Raises:
        SpecError: the plan was made for another model.
    """
    result = plan.differences(job)
    if not result:
        return plan
    key, why = min(result, key=lambda difference: not _other_model(difference[0]))
    if _other_model(key):
        raise SpecError(
            str(plan_file),
            f"was made for another model: {key} {why}",
            "plan this one: raypipe autoconfigure JOB.yaml -o PLAN.json",
        )
    say(f"note: since {plan_file} was planned, {key} {why}; its predicted time and memory no longer apply")
    return plan.model_copy(update={"predicted_step_s": None, "bound_s": None, "made_for": None})


def _other_model(key: str) -> bool:
    return key.startswith("model.") and key != "model.dropout"


def _checked_schedule(plan: Plan, job: JobSpec, model: LayeredModel, plan_file: Path) -> Schedule:
    """Build the plan's schedule after checking its cut against the model's layers, and its edges against both.

    Raises:
        SpecError: the cut does not belong to the model or to the schedule.
        ScheduleError: the schedule cannot run, or does not fit ``train.batch``.
    """
    numbers, layers, own = [i for stage in plan.cut for i in stage], model.count, model.own_stages
    if plan.parallel.placement == "branches":  # a stage is any set of layers
        numbers = sorted(numbers)
    if numbers != list(range(layers)):
        raise SpecError(
            f"{plan_file}: cut",
            f"holds layers {numbers} of a model with layers 0 to {layers - 1}",
            "use a plan made for this job",
        )
    if plan.cut[len(plan.cut) - len(own) :] != own:
        why = f"does not end with the shares of the head and the loss, stages {own}"
        raise SpecError(f"{plan_file}: cut", why, "use a plan made for this job")
    empty = next((s for s, stage in enumerate(plan.cut) if not stage), None)
    if empty is not None:
        raise SpecError(f"{plan_file}: cut", f"gives stage {empty} no layers", "use a plan made for this job")
    try:
        schedule = build_schedule(plan, job.train.batch)
    except ScheduleError as error:
        raise _in_file(error, plan_file) from None
    try:
        check_order(model.results, plan.cut)
        stage_ends(model.results, plan.cut, schedule.graph, schedule.placement[0])
    except ScheduleError as error:
        raise ScheduleError(f"{plan_file}: {error.where}", error.why, error.fix) from None
    return schedule


def _in_file(error: ScheduleError, plan_file: Path) -> ScheduleError:
    """Return an error of a plan's program that begins with the file's name."""
    at = error.where.removeprefix("plan: ")
    inside = [] if at.startswith(("parallel", "program")) else ["program"]
    return ScheduleError(": ".join([str(plan_file), *inside, at]), error.why, error.fix)
