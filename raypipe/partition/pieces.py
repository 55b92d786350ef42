"""From a job's model to pieces and their work, and from a script's to a graph that can be placed: what needs torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path

import torch
from pydantic import ValidationError

from raypipe.capture.capture import capture
from raypipe.capture.meta import build_without_memory
from raypipe.cost.gpt_work import RAYPIPE, STATISTIC, gpt_work
from raypipe.cost.kernels import Kernels
from raypipe.cost.profile import HeadProfile, Slicing
from raypipe.cost.tensor import TensorRankWork
from raypipe.errors import CaptureError, RequestError, SpecError
from raypipe.graph.counted import ON_GPU, Autocast
from raypipe.graph.operation_costs import split_flops
from raypipe.graph.placement.from_model import Backward, placement_graph
from raypipe.graph.placement.problem import PlacementGraph
from raypipe.graph.subgraph_work import captured_work
from raypipe.job import GptSpec, JobSpec
from raypipe.job.cluster import load_cluster
from raypipe.job.field_types import WEIGHT_WIDTH, WIDTH
from raypipe.job.model_spec import ImportSpec
from raypipe.models import CutTensor, GptLayers, LayeredModel
from raypipe.models.captured import CapturedModel
from raypipe.models.gpt import make_layer, unset_parameters
from raypipe.models.sources.imported import Imported
from raypipe.models.task import Field, Labels
from raypipe.partition.report import Crossing, ModelPiece
from raypipe.partition.this_machine import this_machine


def pieces_of(model: LayeredModel, microbatch: int) -> tuple[ModelPiece, ...]:
    """Return the pieces of a model, one a layer; what crosses is that of a micro-batch of so many samples."""
    if isinstance(model, CapturedModel):
        return _captured(model, microbatch)
    assert isinstance(model, GptLayers)
    made = []
    for i, name in enumerate(model.names):
        with unset_parameters():
            layer = make_layer(model.model, i)
        values = tuple((model.owner(f"{i}.{path}"), p.numel()) for path, p in layer.named_parameters())
        behind = model.crossing(i, microbatch) if i < model.count - 1 else ()
        crossing = tuple(_crossing("residual stream", tensor) for tensor in behind)
        made.append(
            ModelPiece(
                name.partition(".")[0], name if "." in name else "", values, model.flops[i], crossing, model.flops[i]
            )
        )
    return tuple(made)


def _captured(model: CapturedModel, microbatch: int) -> tuple[ModelPiece, ...]:
    graph, sharding, one = model.graph, model.sharding, model.sizes(1)
    made = []
    for i, (a, b) in enumerate(pairwise([*sharding.starts, sharding.end])):
        names = graph.parameters_of(graph.operations[a:b])
        last = i == sharding.count - 1
        crossing = () if last else zip(sharding.cuts[i], model.crossing(i, microbatch), strict=True)
        behind = tuple(_crossing(graph.operations[n].name, tensor) for n, tensor in crossing)
        values = tuple((name, graph.parameters[name]) for name in names)
        waits = split_flops(graph, range(a, b), one)
        frozen = tuple(name for name in names if not model.is_trained(name))
        made.append(ModelPiece(sharding.labels[i], sharding.blocks[i], values, model.flops[i], behind, *waits, frozen))
    return tuple(made)


def tensor_ranks_of(job: JobSpec, model: LayeredModel, autocast: Autocast = ON_GPU) -> tuple[TensorRankWork, ...]:
    """Return the work of the same layers for the cost model; of a divided model, a member's share of it.

    ``autocast``: that of the devices, which a job in bfloat16 runs under.
    """
    if isinstance(model, CapturedModel):
        under = autocast if job.train.dtype == "bfloat16" else None
        graph = model.in_parts if job.parallel.context > 1 else model.graph
        return captured_work(graph, model.sharding, model.sizes(1), under, job.train.loss_chunk_tokens)
    assert isinstance(job.model, GptSpec)
    works = gpt_work(job.model, job.train.dtype, loss_chunk=job.train.loss_chunk_tokens)
    return tuple(TensorRankWork(work, (), ()) for work in works)


def _crossing(name: str, tensor: CutTensor) -> Crossing:
    size = torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
    return Crossing(name, tensor.shape, str(tensor.dtype).removeprefix("torch."), size)


VARYING = "its samples differ in length, and slices of a micro-batch are of one length"

PACKED = "its rows hold several documents, and what parts of these take is computed for jobs that give parallel.context"
"""Masks of whole rows have to be computed for it, which is slow; see ``CapturedModel.in_parts``."""

DROPPING = (
    "its attention drops weights, and what slices take then is not computed: switch that off (attn_pdrop, "
    "attention_dropout: 0), or give the whole plan"
)
"""Scores of whole sequences are kept until the backward, those of slices are made again."""


def slicing_of(job: JobSpec, model: LayeredModel, fields: Mapping[str, Field] | None) -> Slicing:
    """Return how a model runs in slices of its samples' sequences, or why it cannot.

    Args:
        job: the job.
        model: its layers.
        fields: the raw inputs that the data's arrays provide; None for text.
    """
    positions = model.positions
    if model.packed:
        if job.parallel.context == 1:
            return Slicing(positions=positions, refused=PACKED)
    # An array of rows of one length can be read row by row; those of several lengths cannot.
    elif job.data.type == "lines" or any(field.rows is None for field in (fields or {}).values()):
        return Slicing(positions=positions, refused=VARYING)
    try:
        model.slice_lengths(1)
    except (CaptureError, SpecError) as error:
        where = f"{error.where}: " if isinstance(error, CaptureError) else ""
        return Slicing(positions=positions, refused=where + error.why)
    if isinstance(model, CapturedModel) and model.drops_attention:
        return Slicing(positions=positions, refused=DROPPING)
    return Slicing(positions=positions, shortest=model.shortest_slice, packed=model.packed)


def head_of(job: JobSpec, model: LayeredModel) -> HeadProfile | None:
    """Return the linear head that a model ends with; None if it has none that devices can divide."""
    if not isinstance(model.task, Labels):
        return None
    try:
        head, body = model.head, model.without_head()
    except SpecError:
        return None
    read, dtype = body.read_by_head(1), job.train.dtype
    *positions, inputs = read.shape[1:]
    tokens = prod(positions)
    return HeadProfile(
        rows=head.rows,
        row_parameters=head.row_elements,
        tokens=tokens,
        inputs=inputs,
        share=1.0 - body.flops[-1] / model.flops[-1] if model.flops[-1] else 0.0,
        input_bytes=float(tokens * inputs * read.dtype.itemsize),
        width=WIDTH[dtype],
        master=WEIGHT_WIDTH[dtype],
        statistic=STATISTIC[dtype],
        chunk=job.train.loss_chunk_tokens,
    )


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
