"""``raypipe partition JOB.yaml``: how a model is cut into stages, and what that gains over an even split."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from raypipe.errors import RequestError
from raypipe.observe.strict_json import strict_json

WIDTH = 130
"""Columns that the drawing needs; a narrower terminal wraps lines, which still reads better than cut figures."""


def partition(
    job: Annotated[Path, typer.Argument(help="Job file, such as jobs/quickstart.yaml.")],
    stages: Annotated[
        int | None, typer.Option(min=1, metavar="D", help="Devices along the pipeline [the job's].")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="key.path=value over the job file; repeatable.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measured costs, from raypipe profile [computed ones].")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compute costs for this cluster's devices [this machine's].")
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option(metavar="GIB", help="What weights, optimizer and activations may take of a device.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the partition as one JSON object.")] = False,
) -> None:
    """Capture the job's model, shard it, and deal its sub-graphs to stages so that the slowest is as fast as can be."""
    from raypipe.job import load_job

    overrides = [*(override or ()), *([f"parallel.stages={stages}"] if stages is not None else ())]
    spec = load_job(job, overrides)
    if profile is not None and cluster is not None:
        raise RequestError("--cluster", "a profile has its devices already", "give --profile or --cluster")
    if memory_gib is not None and not memory_gib > 0:
        raise RequestError("--memory-gib", f"{memory_gib:g} GiB hold nothing", "give a number above 0")
    with contextlib.redirect_stdout(sys.stderr):  # libraries print notices; standard output is for results
        from raypipe.partition.partition_job import partition_job
        from raypipe.partition.report import report

        found = report(partition_job(spec, profile, cluster, None if memory_gib is None else memory_gib * 2**30))
    if json:
        print(strict_json(found))
        return
    from rich.console import Console

    from raypipe.observe.partition_view import partition_view

    Console(width=max(WIDTH, Console().width), highlight=False).print(partition_view(found, spec.name))
