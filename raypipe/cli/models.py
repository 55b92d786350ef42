"""Verbs about the costs and the parts of a model: profile, partition, regions, graph and place."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli._shared.options import (
    DAY_S,
    Cluster,
    File,
    JobFile,
    Overrides,
    check_writable,
    comma_list,
    output,
    say,
    write,
)
from raypipe.errors import RequestError
from raypipe.files import strict_json

WIDTHS = {"profile": 110, "partition": 130}
"""Columns that the tables need; a narrower terminal wraps lines, which is more legible than truncated figures."""


def profile(
    job: JobFile,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", parser=output("--out"), metavar="FILE", help="Write the profile to FILE."),
    ] = None,
    override: Overrides = None,
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
    check_writable(out)
    console = stderr_console()
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints notices; keep standard output for results
        from raypipe.profiling.profile_job import measure_profile

        result = measure_profile(spec, sizes, devices, quick=quick, say=Notes(console))
    if (warning := result.noise.warning()) is not None:
        console.print(warning, soft_wrap=True)
    if out is not None:
        write(out, result.model_dump_json(indent=1) + "\n")
    if json:
        print(strict_json(result.model_dump(mode="json")))
        return
    from rich.console import Console

    Console(width=max(WIDTHS["profile"], Console().width)).print(profile_tables(result))
    if out is not None:
        print(f"written to {out}")


def partition(
    job: JobFile,
    stages: Annotated[
        int | None, typer.Option(min=1, metavar="D", help="Number of devices in the pipeline [the job's].")
    ] = None,
    override: Overrides = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use the costs of this profile, from `raypipe profile`.")
    ] = None,
    cluster: Cluster = None,
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

        result = report(partition_job(spec, profile, cluster, None if memory_gib is None else memory_gib * 2**30))
    if json:
        print(strict_json(result))
        return
    from rich.console import Console

    from raypipe.observe.tables import partition_view

    Console(width=max(WIDTHS["partition"], Console().width), highlight=False).print(partition_view(result, spec.name))


MOST = 1000
"""Regions, and repeats, beyond which a measurement takes days."""


def regions(
    job: JobFile,
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
    override: Overrides = None,
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
    from raypipe.observe.tables import regions_document, regions_table
    from raypipe.plan.regions.joint import check_same, joint_schedule, plan_of
    from raypipe.plan.regions.profile import load_regions

    for option, value in (("--regions", count), ("--repeats", repeats)):
        if not 1 <= value <= MOST:
            raise RequestError(option, f"{value}", f"give 1 to {MOST}")
    if not 1.0 <= memory <= MOST:
        raise RequestError("--memory", f"{memory:g} times the usual step's", "give 1 or more, such as 1.1")
    spec = load_job(job, override or ())
    check_writable(out, plan)
    if profile is not None:
        result = load_regions(profile)
        check_same(spec, result, str(profile))
    else:
        with contextlib.redirect_stdout(sys.stderr):
            from raypipe.profiling.regions import measure_regions

            result = measure_regions(spec, spec.parallel.microbatch, count, repeats, say)
    if out is not None:
        write(out, result.model_dump_json(indent=1) + "\n")
    joint = joint_schedule(result, memory)
    if plan is not None:
        write(plan, plan_of(spec, result, joint).text())
    if json:
        print(strict_json(regions_document(result, joint)))
        return
    from rich.console import Console

    Console(highlight=False).print(regions_table(result, joint))
    for path in (out, plan):
        if path is not None:
            print(f"written to {path}")


def graph(
    model: Annotated[str, typer.Argument(help="A function that builds a torch module: package.module:function.")],
    input_: Annotated[
        list[str],
        typer.Option("--input", metavar="NAME=SHAPE", help="An input of the forward, as image=3x299x299; repeatable."),
    ],
    batch: Annotated[int, typer.Option(min=1, help="Samples of a step.")] = 32,
    cluster: Cluster = None,
    dtype: Annotated[str, typer.Option(help="Arithmetic that times are computed for.")] = "float32",
    backward: Annotated[
        str, typer.Option(help="joint: one operation; split: input and weight gradient; none.")
    ] = "joint",
    bytes_per_parameter: Annotated[
        float, typer.Option(metavar="BYTES", help="Parameter, gradient and optimizer state.")
    ] = 16.0,
    every: Annotated[
        bool, typer.Option("--every", help="Keep every operation apart, also those that only hand one tensor on.")
    ] = False,
    file: Annotated[
        File, typer.Option("-o", parser=output("-o"), metavar="FILE", help="Write here [standard output].")
    ] = None,
) -> None:
    """Write a model's operations, tensors, times and memory as the graph that raypipe place reads."""
    from raypipe.graph.placement.from_model import BACKWARDS

    if backward not in BACKWARDS:
        raise RequestError("--backward", f'"{backward}" is unknown', f"use {', '.join(BACKWARDS)}")
    if not bytes_per_parameter >= 0 or bytes_per_parameter == float("inf"):
        raise RequestError("--bytes-per-parameter", f"{bytes_per_parameter:g} is no size", "give a number from 0 up")
    check_writable(file)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print notices; standard output is for results
        from raypipe.partition.pieces import graph_of_model

        result = graph_of_model(model, input_, batch, cluster, dtype, backward, bytes_per_parameter, not every)
    text = result.model_dump_json(exclude_none=True)
    if file is None:
        print(text)
        return
    write(file, text + "\n")
    total = sum(op.seconds for op in result.operations if isinstance(op.seconds, float))
    print(f"{len(result.operations)} operations, {len(result.edges)} tensors, {total:.4g} s on one device: {file}")


def place(
    graph: Annotated[Path, typer.Argument(help="Operation graph, as raypipe graph writes it.")],
    hardware: Annotated[
        Path, typer.Argument(help="Nodes, routers and links, such as cluster/placement/two-v100.json.")
    ],
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Longest search.")] = 60.0,
    contention: Annotated[
        bool, typer.Option("--contention", help="A link carries one tensor at a time in each direction.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the placement as one JSON object.")] = False,
) -> None:
    """Place operations on nodes, with start times and routes, for the shortest step; the best so far after --budget."""
    from raypipe.graph.placement.problem import load_problem

    if not 0 < budget <= DAY_S:
        raise RequestError("--budget", f"{budget:g} seconds", f"give more than 0 and at most {DAY_S:g}")
    operations, machine = load_problem(graph, hardware)
    from raypipe.graph.placement.place import place as solve

    result = solve(operations, machine, budget, contention)
    if json:
        print(strict_json(result.document(operations)))
        return
    from rich.console import Console

    from raypipe.observe.tables import placement_view

    Console(highlight=False).print(placement_view(operations, machine, result))
