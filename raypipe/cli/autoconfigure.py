"""``raypipe autoconfigure JOB.yaml``: choose the fastest plan for a job on a cluster, and say why the others lost."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypipe.cli._shared.files import check_writable, output, write
from raypipe.cli._shared.values import DAY_S
from raypipe.errors import RequestError, nearest
from raypipe.observe.strict_json import strict_json

if TYPE_CHECKING:
    from raypipe.cost.profile import Profile
    from raypipe.job.spec import JobSpec
    from raypipe.plan.tensor_groups import Sharing

ALLOWED = ("asynchronous",)


def autoconfigure(
    job: Annotated[Path, typer.Argument(help="Job file; its parallel keys play no part, but those beside auto: true.")],
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plan for this described cluster, such as cluster/a100.yaml.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plan with the costs that `raypipe profile` measured.")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, metavar="P", help="Devices to use at most [all]; with --cluster, so many of such hosts."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, metavar="K", help="How many of the best to name.")] = 10,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            parser=output("--out"),
            metavar="FILE",
            help="Where the plan goes, for `raypipe train --plan FILE`.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the ranking as one JSON object.")] = False,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="key.path=value over the job file; repeatable.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="WHAT", help="asynchronous: schedules on stale weights may win.")
    ] = None,
    policy: Annotated[str, typer.Option(help="best, or largest-microbatch: Chimera's greedy rule.")] = "best",
    search: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Time for searching orders of the best placements.")
    ] = 3.0,
) -> None:
    """Choose schedule, depth, width, micro-batch and the rest for a job. Without --cluster and --profile: for the live
    Ray cluster, else this machine, measured by a short profile."""
    from raypipe.cost.profile_check import check_profile, doubts
    from raypipe.job import load_job
    from raypipe.plan.choose import POLICIES, choose
    from raypipe.plan.decision_json import as_json

    for word in allow or ():
        if word not in ALLOWED:
            raise RequestError("--allow", f'"{word}" is unknown', nearest(word, ALLOWED))
    if policy not in POLICIES:
        raise RequestError("--policy", f'"{policy}" is unknown', nearest(policy, POLICIES))
    if cluster is not None and profile is not None:
        raise RequestError(
            "--cluster", "a profile knows its cluster", "give --cluster or --profile, and --devices with either"
        )
    if not search <= DAY_S:
        raise RequestError("--search", f"{search:g} is no time for a search", f"give seconds from 0 to {DAY_S:g}")
    if out is not None:
        check_writable(out)
    spec = load_job(job, override or ())
    costs, shared = _costs(spec, cluster, profile, devices)
    check_profile(spec, costs)
    for doubt in doubts(spec, costs, devices if profile is not None else None):
        print(doubt, file=sys.stderr)
    decision = choose(
        spec, costs, devices, top=top, asynchronous="asynchronous" in (allow or ()), policy=policy, search_s=search,
        shared=shared,
    )  # fmt: skip
    if out is not None:
        write(out, decision.plan.text())
        print(f"wrote {out}", file=sys.stderr)
    if json:
        print(strict_json(as_json(decision)))
        return
    from rich.console import Console

    from raypipe.observe.plan_table import WIDTH, show_decision

    show_decision(decision, Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH))


def _costs(
    job: JobSpec, cluster: Path | None, profile: Path | None, devices: int | None
) -> tuple[Profile, dict[Sharing, Profile]]:
    """The profile to plan with: the given one, one of the described cluster, or one measured now; and of a described
    cluster those whose devices are groups that share layers."""
    if profile is not None:
        from raypipe.cost.profile import load_profile

        return load_profile(profile), {}
    if cluster is not None:
        from raypipe.job import load_cluster
        from raypipe.partition.job_costs import job_profile, shared_profiles

        described = load_cluster(cluster)
        if devices is not None:
            described = described.resized(devices)
        with contextlib.redirect_stdout(sys.stderr):  # libraries print notices; standard output is for results
            return job_profile(job, described), shared_profiles(job, described)
    from raypipe.observe.progress import stderr_console
    from raypipe.profiling.profile_and_plan import profile_this_machine

    console = stderr_console()
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints notices of its own; standard output is for results
        return profile_this_machine(job, devices, None, None, lambda text: console.print(text, style="dim")), {}
