"""The placement graph of a model that a function builds: captured, and costed for one kind of device."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import ValidationError

from raypipe.capture.capture import capture
from raypipe.capture.meta import build_without_memory
from raypipe.cost.gpt_work import RAYPIPE
from raypipe.cost.kernels import Kernels
from raypipe.errors import RequestError, SpecError
from raypipe.graph.placement.from_model import Backward, placement_graph
from raypipe.graph.placement.problem import PlacementGraph
from raypipe.job.cluster import load_cluster
from raypipe.job.field_types import WIDTH
from raypipe.job.model_spec import ImportSpec
from raypipe.models.sources.imported import Imported
from raypipe.partition.this_machine import this_machine

TYPES = {"float": torch.float32, "int": torch.int64}
LARGEST = 2**31


def graph_of_model(
    function: str,
    inputs: Sequence[str],
    batch: int,
    cluster: Path | None,
    dtype: str,
    backward: Backward,
    bytes_per_parameter: float,
    merge: bool,
) -> PlacementGraph:
    """Capture the module that ``function`` returns and cost one step of it.

    Args:
        function: ``package.module:function``.
        inputs: ``name=SHAPE`` without the batch, as ``image=3x299x299``; ``tokens=128:int`` for whole numbers.
        batch: samples of a step.
        cluster: file that describes the device; None for this machine.
        dtype: arithmetic, of those that the device has a peak for.
        backward, bytes_per_parameter, merge: as ``placement_graph``.

    Raises:
        SpecError, RequestError: no such function, an input that cannot be read, or no such peak.
        CaptureError: the model cannot be captured.
    """
    machine = this_machine(dtype, 1) if cluster is None else load_cluster(cluster).of_one_kind(str(cluster))
    device = machine.device
    peaks = [name for name in map(str, device.peak_tflops) if name in WIDTH]
    if dtype not in peaks:
        raise SpecError("--dtype", f"{device.name} has no peak_tflops for {dtype}", f"use {' or '.join(peaks)}")
    kernels = Kernels.of(device, dtype, RAYPIPE)
    try:
        build = Imported(ImportSpec.model_validate({"import": function})).build
    except ValidationError:
        raise RequestError(
            "MODEL", f'"{function}" is not package.module:function', "write for example jobs.inception_v3:build"
        ) from None
    read = dict(map(_input, inputs))
    module = build_without_memory(build)
    try:
        inspect.signature(module.forward).bind(**read)
    except TypeError as error:
        taken = ", ".join(inspect.signature(module.forward).parameters)
        raise RequestError("--input", f"{function}'s forward has {error}", f"its arguments are {taken}") from None
    captured = capture(module, {name: torch.zeros(2, *shape, dtype=kind) for name, (shape, kind) in read.items()})
    one = captured.graph.sizes(
        {name: (1, *shape) for name, (shape, _) in read.items() if name in captured.graph.inputs}
    )
    return placement_graph(captured.graph, one, batch, kernels, bytes_per_parameter, backward, merge)


def _input(text: str) -> tuple[str, tuple[tuple[int, ...], torch.dtype]]:
    name, equals, rest = text.partition("=")
    shape, _, kind = rest.partition(":")
    sizes = shape.split("x") if shape else []
    whole = all(size.isascii() and size.isdecimal() and int(size) > 0 for size in sizes)
    if not (name and equals and whole) or kind not in ("", *TYPES):
        raise RequestError(
            f"--input {text}", "is not NAME=SHAPE", "write for example image=3x299x299 or tokens=128:int"
        )
    result = tuple(map(int, sizes))
    if torch.Size(result).numel() > LARGEST:
        raise RequestError(f"--input {text}", "is larger than any sample", "check the shape")
    return name, (result, TYPES[kind or "float"])
