"""``raypipe profile JOB.yaml``: measure the costs of a model on the devices of the cluster."""

from __future__ import annotations

import contextlib
import json as json_module
import sys
from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli._shared.files import check_writable, output, write
from raypipe.cli._shared.values import comma_list
from raypipe.errors import RequestError

WIDTH = 110
"""Columns that the table needs; a narrower terminal wraps lines, which is more legible than truncated figures."""


def profile(
    job: Annotated[Path, typer.Argument(help="Job file, such as jobs/quickstart.yaml.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", parser=output("--out"), metavar="FILE", help="Write the profile to FILE."),
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the job file: key.path=value; repeatable.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, metavar="P", help="Number of devices to measure on [all].")
    ] = None,
    microbatches: Annotated[
        str | None, typer.Option(metavar="LIST", help="Micro-batch sizes [powers of two up to 16, and the job's].")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure for a few seconds only, with fewer repeats.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as one JSON object.")] = False,
) -> None:
    """Measure a job's layers, optimizer, messages and collectives with Ray, on the devices that will train it."""
    from raypipe.job import load_job
    from raypipe.observe.progress import Notes, stderr_console
    from raypipe.observe.tables import profile_tables

    spec = load_job(job, override or ())
    most = max(1, spec.train.batch)
    default = sorted({2**k for k in range(5) if 2**k <= most} | {spec.parallel.microbatch})
    sizes = comma_list("--microbatches", microbatches, int) if microbatches is not None else default
    if (wrong := next((n for n in sizes if not 1 <= n <= most), None)) is not None:
        raise RequestError("--microbatches", f"{wrong} for a mini-batch of {most}", f"give sizes from 1 to {most}")
    if out is not None:
        check_writable(out)
    console = stderr_console()
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints notices; keep standard output for results
        from raypipe.profiling.profile_job import measure_profile

        found = measure_profile(spec, sizes, devices, quick=quick, say=Notes(console))
    if (warning := found.noise.warning()) is not None:
        console.print(warning, soft_wrap=True)
    if out is not None:
        write(out, found.model_dump_json(indent=1) + "\n")
    if json:
        print(json_module.dumps(found.model_dump(mode="json")))
        return
    from rich.console import Console

    Console(width=max(WIDTH, Console().width)).print(profile_tables(found))
    if out is not None:
        print(f"written to {out}")
