"""``raypipe submit``: the same as ``raypipe train``, as a job of a Ray cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def submit(
    job: Annotated[Path, typer.Argument(help="Job file below the current folder, such as jobs/quickstart.yaml.")],
    address: Annotated[
        str | None,
        typer.Option(help="The cluster's job server, such as http://HOST:8265 [RAY_ADDRESS, or this machine's]."),
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="key.path=value over the job file; repeatable.")
    ] = None,
    run_dir: Annotated[
        str | None,
        typer.Option(help="Where the run's files go, on a file system of the nodes; default ~/raypipe/runs/NAME-TIME."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run directory's newest checkpoint.")] = False,
    runtime_env: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What travels beside the current folder [jobs/runtime_env.yaml]."),
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return once the job server has taken it.")] = False,
) -> None:
    """Submit a job to a Ray cluster, with the current folder as its working directory, and follow it to its end."""
    from raypipe.job import load_job
    from raypipe.launch.submit import submission
    from raypipe.launch.submit import submit as hand_over

    spec = load_job(job, override or ())  # what is wrong with it is told here, not in the cluster
    what = submission(job, override or (), run_dir, resume, runtime_env, Path.cwd())
    taken = hand_over(what, address, spec.name)
    print(f"submitted {taken.id}, as this does: {what.command}", file=sys.stderr)
    if no_wait:
        print(taken.id)
        return

    def show(text: str) -> None:
        print(text, end="", flush=True)

    status = taken.follow(show)
    if status:
        raise typer.Exit(status)
