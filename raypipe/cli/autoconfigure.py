"""``raypipe autoconfigure JOB.yaml``: choose the fastest plan for a job on a cluster and explain the choice."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from raypipe.cli._shared.files import check_writable, described_cluster, output, write
from raypipe.cli._shared.values import DAY_S
from raypipe.errors import RequestError, nearest
from raypipe.observe.strict_json import strict_json

if TYPE_CHECKING:
    from raypipe.cost.profile import Profile
    from raypipe.job.spec import JobSpec
    from raypipe.plan.tensor_groups import Sharing

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
            help="Write the plan to FILE, for `raypipe train --plan FILE`.",
        ),
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
    search: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Time to search orders for the best placements.")
    ] = 3.0,
) -> None:
    """Choose the schedule, pipeline depth, replicas, micro-batch size and further options for a job. Without --cluster
    and --profile, plan for the running Ray cluster or else this machine, after a short profile."""
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
        raise RequestError("--cluster", "a profile already describes its cluster", "give either --cluster or --profile")
    if not search <= DAY_S:
        raise RequestError("--search", f"{search:g} is not a valid time", f"give seconds from 0 to {DAY_S:g}")
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
    """Return the profile to plan with: the given one, that of the described cluster, or one measured now.

    For a described cluster, also return the profiles whose devices are tensor-parallel groups.
    """
    if profile is not None:
        from raypipe.cost.profile import load_profile

        return load_profile(profile), {}
    if cluster is not None:
        from raypipe.job import load_cluster
        from raypipe.partition.job_costs import job_profile, shared_profiles

        described = load_cluster(cluster)
        if devices is not None:
            described = described.resized(devices)
        with contextlib.redirect_stdout(sys.stderr):  # libraries print notices; keep standard output for results
            return job_profile(job, described), shared_profiles(job, described)
    from raypipe.observe.progress import stderr_console
    from raypipe.profiling.profile_and_plan import profile_this_machine

    console = stderr_console()
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints notices; keep standard output for results
        return profile_this_machine(job, devices, None, None, lambda text: console.print(text, style="dim")), {}
