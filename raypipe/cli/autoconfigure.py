"""``raypipe autoconfigure JOB.yaml``: choose the fastest plan for a job on a cluster and explain the choice."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypipe.cli._shared.options import DAY_S, check_writable, described_cluster, output, write
from raypipe.errors import RequestError, check_known
from raypipe.files import strict_json

if TYPE_CHECKING:
    from raypipe.cost.profile import Profile
    from raypipe.job.spec import JobSpec
    from raypipe.partition.job_costs import SharedProfiles
    from raypipe.plan.choice import PlanChoice
    from raypipe.plan.choose import Decision
    from raypipe.plan.emit.trainers import Costs, Slow
    from raypipe.plan.tensor_groups import Sharing
    from raypipe.plan.watch import Watch

ALLOWED = ("asynchronous",)


def autoconfigure(
    job: Annotated[
        Path, typer.Argument(help="Job file; of its parallel keys, only those given with auto: true restrict the plan.")
    ],
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=described_cluster,
            help="Plan for this described cluster, such as cluster/devices/a100.yaml.",
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plan with the costs of this profile, from `raypipe profile`.")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, metavar="P", help="Largest number of devices [all]; with --cluster, resizes the cluster."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, metavar="K", help="Number of plans to list.")] = 10,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            parser=output("--out"),
            metavar="FILE",
            help="Write the plan to FILE, for `raypipe train --plan FILE`; with --emit, the trainer's file.",
        ),
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(
            metavar="TRAINER",
            help="megatron, torchtitan, automodel, deepspeed: write the nearest layout that it can express as its own "
            "file, to -o or standard output, and what that loses.",
        ),
    ] = None,
    layout: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="Read a layout from such a trainer's file, and say what is slow about it."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(parser=output("--html"), metavar="FILE", help="Write the plans, compared, as one HTML page."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the ranking as one JSON object.")] = False,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the job file: key.path=value; repeatable.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="WHAT", help="asynchronous: also consider schedules with stale weights.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="best: the fastest plan; largest-microbatch: Chimera's greedy rule.")
    ] = "best",
    epochs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Epochs table, from `raypipe epochs`: choose the global batch too, by the time to the job's target.",
        ),
    ] = None,
    search: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Time to search orders for the best placements, at most.")
    ] = 3.0,
    budget: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="SECONDS", help="Time after which the best plan so far is taken [10, of processor time]."
        ),
    ] = None,
) -> None:
    """Choose the schedule, pipeline depth, replicas, micro-batch size and further options for a job. Without --cluster
    and --profile, plan for the running Ray cluster or else this machine, after a short profile."""
    from raypipe.cli._shared.planning import watched
    from raypipe.job import load_job
    from raypipe.observe.progress import stderr_console
    from raypipe.observe.tables import batches_document, batches_table
    from raypipe.plan.choice import as_profiled, with_budget
    from raypipe.plan.choose import POLICIES, choose
    from raypipe.plan.decision_json import as_json
    from raypipe.plan.hybrid import load_epochs, rank_batches
    from raypipe.plan.watch import BUDGET_S
    from raypipe.search.budget import Budget

    for word in allow or ():
        check_known(RequestError, "--allow", word, ALLOWED)
    check_known(RequestError, "--policy", policy, POLICIES)
    if cluster is not None and profile is not None:
        raise RequestError("--cluster", "a profile already describes its cluster", "give either --cluster or --profile")
    for name, given_s in (("--search", search), ("--budget", budget)):
        if given_s is not None and not given_s <= DAY_S:
            raise RequestError(name, f"{given_s:g} is not a valid time", f"give seconds from 0 to {DAY_S:g}")
    if emit is not None:
        from raypipe.plan.emit.trainers import TRAINERS

        check_known(RequestError, "--emit", emit, TRAINERS)
        if json and out is None:
            raise RequestError("--emit", "its file and --json both go to standard output", "give -o FILE")
    for file in (out, html):
        if file is not None:
            check_writable(file)
    spec = load_job(job, override or ())
    table = None if epochs is None else load_epochs(epochs)
    share = 1.0 if table is None else 1 / len(table.epochs)
    given = None if cluster is profile is None else _given_costs(spec, cluster, profile, devices)
    if given is not None:
        spec = as_profiled(spec, given[0])
        _check(spec, given[0], devices if profile is not None else None)
    taken: dict[float, Profile] = {}

    def measure(one: JobSpec) -> Profile:
        budget = one.parallel.activation_memory_budget  # the only key in which jobs differ here that costs depend on
        if budget not in taken:
            own = with_budget(spec, budget)
            taken[budget] = _measured_costs(own, devices)
            _check(own, taken[budget])
        return taken[budget]

    watches: list[Watch] = []

    def plan(one: JobSpec, costs: Profile) -> Decision:
        seconds = Budget(share * BUDGET_S) if budget is None else Budget(share * budget, wall=True)
        with watched(seconds, stderr_console()) as watch:
            watches.append(watch)
            coming = None if given is None else given[1]
            shared, earlier = ({}, None) if coming is None else _shared(coming, one, costs, devices, watch)
            return choose(
                one,
                costs,
                devices,
                top=top,
                asynchronous="asynchronous" in (allow or ()),
                policy=policy,
                search_s=share * search,
                shared=shared,
                watch=watch,
                earlier=earlier,
            )

    def plan_for(one: JobSpec) -> Decision:
        if given is not None:
            return plan(one, given[0])
        from raypipe.profiling.profile_and_plan import choose_budget  # Ray and torch

        return choose_budget(one, measure, plan, lambda text: print(text, file=sys.stderr))

    batches = None if table is None else rank_batches(spec, table, plan_for)
    decision = plan_for(spec) if batches is None else batches.ranked[0].decision
    if emit is not None or layout is not None:
        from raypipe.plan.emit.trainers import Costs

        budget_share = decision.plan.parallel.activation_memory_budget
        if batches is not None:
            spec = spec.model_copy(update={"train": spec.train.model_copy(update={"batch": batches.ranked[0].batch})})
        shared = {} if given is None or given[1] is None else given[1].get()
        divided = None if given is None or given[1] is None else given[1].of
        costs = Costs(spec, taken[budget_share] if given is None else given[0], shared, divided)
    text = decision.plan.text() if emit is None else _emitted(emit, decision, costs, out)
    if out is not None:
        write(out, text)
        print(f"wrote {out}", file=sys.stderr)
    if html is not None:
        from raypipe.observe.pages import plans_page

        write(html, plans_page(decision, job.stem))
        print(f"wrote {html}", file=sys.stderr)
    slow = None if layout is None else _slow(layout, decision, costs, devices)
    if json:
        document = as_json(decision, spec.model.sequence) | {"first_plan_s": _age_at(watches[0].first_plan)}
        document |= {} if batches is None else {"time_to_target": batches_document(batches)}
        print(strict_json(document | ({} if slow is None else {"from": asdict(slow[1])})))
        return
    if emit is not None and out is None:
        print(text, end="")
        return
    from rich.console import Console

    from raypipe.observe.plan_table import WIDTH, show_decision

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    if slow is not None:
        console.print("\n".join(slow[1].lines(slow[0])) + "\n", markup=False, soft_wrap=True)
    if batches is not None:
        console.print(batches_table(batches))
        for batch, why in batches.left_out.items():
            console.print(f"no plan for a batch of {batch}: {why}", markup=False)
        first = batches.ranked[0]
        keys = f"train.batch: {first.batch}" + ("" if first.lr is None else f" and train.lr: {first.lr:.3g}")
        console.print(f"\nset {keys}; the plans of that batch:\n", markup=False)
    show_decision(decision, console)


def _age_at(moment: float | None) -> float | None:
    """Return this process's age in seconds at a moment of its monotonic clock."""
    import psutil

    if moment is None:
        return None
    return time.time() - psutil.Process().create_time() - (time.monotonic() - moment)


def _emitted(trainer: str, decision: Decision, costs: Costs, file: Path | None) -> str:
    """Return the plan as a trainer's file, and say what that loses."""
    from raypipe.plan.emit.trainers import emit

    result = emit(trainer, decision.plan, costs, file)
    for line in result.lost:
        print(line, file=sys.stderr)
    return result.text


def _slow(file: Path, decision: Decision, costs: Costs, devices: int | None) -> tuple[str, Slow]:
    """Return a layout's file with its trainer, and what is slow about it."""
    from raypipe.plan.emit.trainers import read, slow

    title, result = read(file, costs, devices or costs.devices)
    return f"{file} ({title})", slow(result, decision.plan, costs)


def _check(job: JobSpec, costs: Profile, devices: int | None = None) -> None:
    """Refuse costs that are not the job's, and say where they may be off."""
    from raypipe.cost.profile_check import check_profile, doubts

    check_profile(job, costs)
    for doubt in doubts(job, costs, devices):
        print(doubt, file=sys.stderr)


def _shared(
    coming: SharedProfiles, job: JobSpec, costs: Profile, devices: int | None, watch: Watch
) -> tuple[dict[Sharing, Profile], PlanChoice | None]:
    """Return the profiles of devices that share layers or experts; until they are there, look for a plan without, and
    return what was searched for it."""
    from raypipe.plan.choose import look_for_first

    earlier = None
    if not coming.ready:
        earlier = look_for_first(job, costs, devices, watch, lambda: coming.ready, coming.experts)
        if not watch.over:
            with contextlib.redirect_stdout(sys.stderr):
                coming.help()
    _compile()
    while not coming.ready:
        if watch.over and watch.first_plan is not None:
            print(
                "plans whose devices share layers are left out: the time was up before they were costed",
                file=sys.stderr,
            )
            return coming.experts, earlier
        time.sleep(0.02)
    with contextlib.redirect_stdout(sys.stderr):
        return coming.get(), earlier


def _given_costs(
    job: JobSpec, cluster: Path | None, profile: Path | None, devices: int | None
) -> tuple[Profile, SharedProfiles | None]:
    """Return the given profile, or that of the described cluster; then also those whose devices are tensor-parallel
    groups, which may still be coming."""
    if profile is not None:
        from raypipe.cost.profile import load_profile

        return load_profile(profile), None
    from raypipe.job import load_cluster
    from raypipe.partition.job_costs import SharedProfiles, job_profile
    from raypipe.partition.partition_job import check_state

    assert cluster is not None
    described = load_cluster(cluster)
    if devices is not None:
        described = described.resized(devices)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print notices; keep standard output for results
        check_state(job, described)
        coming = SharedProfiles(job, described)  # after it, as it then has what that has imported
        if coming.ready:  # else captures, which the first plan waits for, have the cores
            _compile()
        return job_profile(job, described), coming


def _compile() -> None:
    """Begin to compile the planner beside, where this machine has not yet."""
    from raypipe.plan.joint.better_plans import compile_kernels

    if compile_kernels():
        print("compiling the planner, once on this machine, beside the search for a first plan", file=sys.stderr)


def _measured_costs(job: JobSpec, devices: int | None) -> Profile:
    from raypipe.observe.progress import Notes, stderr_console
    from raypipe.plan.joint.better_plans import compile_kernels
    from raypipe.profiling.profile_and_plan import profile_this_machine

    compile_kernels()
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints notices; keep standard output for results
        return profile_this_machine(job, devices, None, None, Notes(stderr_console()))
