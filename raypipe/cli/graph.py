"""``raypipe graph MODEL``: the operation graph of a training step, with costs, for ``raypipe place``."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from raypipe.cli._shared.files import check_writable, described_cluster, output, write
from raypipe.cli._shared.options import File
from raypipe.errors import RequestError


def graph(
    model: Annotated[str, typer.Argument(help="A function that builds a torch module: package.module:function.")],
    input_: Annotated[
        list[str],
        typer.Option("--input", metavar="NAME=SHAPE", help="An input of the forward, as image=3x299x299; repeatable."),
    ],
    batch: Annotated[int, typer.Option(min=1, help="Samples of a step.")] = 32,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", parser=described_cluster, help="Compute times for this cluster's devices [this machine's]."
        ),
    ] = None,
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
    if file is not None:
        check_writable(file)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print notices; standard output is for results
        from raypipe.partition.graph_of_model import graph_of_model

        found = graph_of_model(model, input_, batch, cluster, dtype, backward, bytes_per_parameter, not every)
    text = found.model_dump_json(exclude_none=True)
    if file is None:
        print(text)
        return
    write(file, text + "\n")
    total = sum(op.seconds for op in found.operations if isinstance(op.seconds, float))
    print(f"{len(found.operations)} operations, {len(found.edges)} tensors, {total:.4g} s on one device: {file}")
