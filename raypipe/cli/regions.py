"""``raypipe regions JOB.yaml``: plan a second stream for weight gradients and updates on one device."""

from __future__ import annotations

import contextlib
import json as json_module
import sys
from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli._shared.files import check_writable, output, write
from raypipe.errors import RequestError

MOST = 1000
"""Regions, and repeats, beyond which a measurement takes days."""


def regions(
    job: Annotated[Path, typer.Argument(help="Job file, such as jobs/quickstart.yaml.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", parser=output("--out"), metavar="FILE", help="Write what was measured to FILE."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", parser=output("--plan"), metavar="FILE", help="Write the plan, for raypipe train."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What -o has written: measure nothing, plan with it.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the job file: key.path=value; repeatable.")
    ] = None,
    count: Annotated[
        int, typer.Option("--regions", metavar="N", help="Regions of the forward, and as many of the backward.")
    ] = 4,
    repeats: Annotated[int, typer.Option(metavar="R", help="Measurements of each pair; the median counts.")] = 5,
    memory: Annotated[
        float, typer.Option(metavar="X", help="Largest peak of activations, in times the usual step's.")
    ] = 1.1,
    json: Annotated[bool, typer.Option("--json", help="Print the decision as one JSON object.")] = False,
) -> None:
    """Measure regions of a step beside weight gradients, on this machine's GPU or two of its cores, and plan both."""
    from raypipe.job import load_job
    from raypipe.observe.progress import stderr_console
    from raypipe.observe.tables import regions_document, regions_table
    from raypipe.plan.regions.as_plan import check_same, plan_of
    from raypipe.plan.regions.joint import joint_schedule
    from raypipe.plan.regions.profile import load_regions

    for option, value in (("--regions", count), ("--repeats", repeats)):
        if not 1 <= value <= MOST:
            raise RequestError(option, f"{value}", f"give 1 to {MOST}")
    if not 1.0 <= memory <= MOST:
        raise RequestError("--memory", f"{memory:g} times the usual step's", "give 1 or more, such as 1.1")
    spec = load_job(job, override or ())
    for path in (out, plan):
        if path is not None:
            check_writable(path)
    if profile is not None:
        found = load_regions(profile)
        check_same(spec, found, str(profile))
    else:
        console = stderr_console()
        with contextlib.redirect_stdout(sys.stderr):
            from raypipe.profiling.regions import measure_regions

            found = measure_regions(
                spec,
                spec.parallel.microbatch,
                count,
                repeats,
                lambda text: console.print(text, style="dim", soft_wrap=True),
            )
    if out is not None:
        write(out, found.model_dump_json(indent=1) + "\n")
    joint = joint_schedule(found, memory)
    if plan is not None:
        write(plan, plan_of(spec, found, joint).text())
    if json:
        print(json_module.dumps(regions_document(found, joint)))
        return
    from rich.console import Console

    Console(highlight=False).print(regions_table(found, joint))
    for path in (out, plan):
        if path is not None:
            print(f"written to {path}")
