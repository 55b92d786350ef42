"""``raypipe partition JOB.yaml``: show how a model is cut into stages and what that gains over an even split."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli._shared.files import described_cluster
from raypipe.errors import RequestError
from raypipe.observe.strict_json import strict_json

WIDTH = 130
"""Columns that the drawing needs; a narrower terminal wraps lines, which is more legible than truncated figures."""


def partition(
    job: Annotated[Path, typer.Argument(help="Job file, such as jobs/quickstart.yaml.")],
    stages: Annotated[
        int | None, typer.Option(min=1, metavar="D", help="Number of devices in the pipeline [the job's].")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the job file: key.path=value; repeatable.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use the costs of this profile, from `raypipe profile`.")
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", parser=described_cluster, help="Compute costs for this cluster's devices [this machine's]."
        ),
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option(metavar="GIB", help="Limit for weights, optimizer and activations per device.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the partition as one JSON object.")] = False,
) -> None:
    """Capture the job's model, divide it into sub-graphs, and assign these to stages so that the slowest device is as
    fast as possible."""
    from raypipe.job import load_job

    overrides = [*(override or ()), *([f"parallel.stages={stages}"] if stages is not None else ())]
    spec = load_job(job, overrides)
    if profile is not None and cluster is not None:
        raise RequestError("--cluster", "a profile already describes its devices", "give --profile or --cluster")
    if memory_gib is not None and not memory_gib > 0:
        raise RequestError("--memory-gib", f"{memory_gib:g} GiB is not a memory size", "give a number above 0")
    with contextlib.redirect_stdout(sys.stderr):  # libraries print notices; keep standard output for results
        from raypipe.partition.partition_job import partition_job
        from raypipe.partition.report import report

        found = report(partition_job(spec, profile, cluster, None if memory_gib is None else memory_gib * 2**30))
    if json:
        print(strict_json(found))
        return
    from rich.console import Console

    from raypipe.observe.tables import partition_view

    Console(width=max(WIDTH, Console().width), highlight=False).print(partition_view(found, spec.name))
