"""Tensor parallelism: what one rank of a tensor-parallel group computes, holds and exchanges.

A group of T devices counts as one device in the profile. Its ranks work in lockstep, so a task takes as long as one
rank's share of it plus the all-reduces inside it. Code that reads a profile therefore needs no knowledge of groups.

Source: Merak section 5.3 for what a layer exchanges (two all-reduces forward, two backward); Shoeybi et al. 2019,
section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from raypipe.cost.analytic import SIZES, analytic_profile
from raypipe.cost.collectives import Kind, collective_seconds
from raypipe.cost.gpt_work import RAYPIPE, SOFTWARE, STATISTIC, Software, gpt_work, mask_bytes, master_width
from raypipe.cost.hosts import Hosts, Layout
from raypipe.cost.layer_work import LayerWork, TaskWork
from raypipe.cost.profile import LayerProfile, Profile
from raypipe.errors import SpecError
from raypipe.job.cluster import ClusterSpec
from raypipe.job.field_types import WIDTH
from raypipe.job.model_spec import GptSpec

DIVIDED = ("flops", "operands", "weights", "traffic", "attention", "full_attention", "quantized")
"""Fields of ``TaskWork`` of which a tensor rank has its share; the overhead of kernels stays."""


class Exchange(NamedTuple):
    """A collective over the group in the forward or backward of one sample."""

    kind: Kind
    bytes: float
    """Size of the whole vector."""


class TensorRankWork(NamedTuple):
    """The work of one layer on each tensor rank."""

    work: LayerWork
    forward: tuple[Exchange, ...] = ()
    """What its forward exchanges for one sample."""
    backward: tuple[Exchange, ...] = ()
    """The same of its backward."""


def all_reduces(*sizes: float) -> tuple[Exchange, ...]:
    """Return all-reduces of so many bytes each."""
    return tuple(Exchange("all_reduce", size) for size in sizes)


def divided_gpt(
    model: GptSpec,
    dtype: str,
    size: int,
    software: Software = RAYPIPE,
    loss_chunk: int | None = None,
    sequence: bool = False,
) -> tuple[TensorRankWork, ...]:
    """Return a tensor rank's share of each layer of a GPT, in a group of ``size``; ``loss_chunk``: as ``gpt_work``.

    Norms, residual sums and dropout on the residual stream are replicated on every rank; so are the inputs of the
    first product of each pair and the outputs of the second. With ``sequence`` (``parallel.sequence_parallel``), only
    these inputs and outputs are.

    Raises:
        SpecError: the number of heads is not divisible by ``size``.
    """
    if model.heads % size:
        near = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
        fix = f"use one of {', '.join(map(str, near))}"
        raise SpecError("parallel.tensor", f"{model.heads} heads are not divisible by {size}", fix)
    s, h = model.sequence, model.hidden
    e, m = WIDTH[dtype], master_width(dtype, software)
    stream = float(s * h)
    moved, kept = mask_bytes(e, software) if model.dropout else (0, 0)
    cast = 2 * (m + e) * stream if e != m else 0.0
    norms = 4 * m * stream + cast
    replicated_block = LayerWork(
        name="block",
        parameters=6 * h,  # two norms, and the biases added after the all-reduces
        forward=TaskWork(operands=4 * e * stream, traffic=norms + 2 * (2 * m + e + moved) * stream),
        input_grad=TaskWork(operands=4 * e * stream, traffic=12 * m * stream + cast + 6 * e * stream * (moved > 0)),
        weight_grad=TaskWork(operands=4 * e * stream),
        kept_bytes=(2 * m + 2 * e + 2 * kept) * stream + 4 * STATISTIC[dtype] * s,
        fused_kept_bytes=(2 * m + 2 * kept) * stream + 4 * STATISTIC[dtype] * s,
        fused_operand_bytes=2 * e * stream,
        operand_bytes=2 * e * stream,
        waiting_bytes=4 * e * stream,
        output_bytes=m * stream,
    )
    embedding, *blocks, head = gpt_work(model, dtype, software, loss_chunk)
    # Only the embedding's table is divided.
    replicated_embedding = replace(
        embedding, parameters=s * h, weight_grad=replace(embedding.weight_grad, weights=0.0), workspace_fixed_bytes=0.0
    )
    replicated_head = LayerWork(
        name="head",
        parameters=2 * h,
        forward=TaskWork(operands=e * stream, traffic=2 * m * stream + cast / 2),
        input_grad=TaskWork(operands=e * stream, traffic=3 * m * stream),
        weight_grad=TaskWork(operands=e * stream),
        kept_bytes=(m + e * (1 if loss_chunk is None else 2)) * stream + (2 * STATISTIC[dtype] + 8) * s,
        fused_kept_bytes=m * stream + (2 * STATISTIC[dtype] + 8) * s,
        fused_operand_bytes=e * stream,
        waiting_bytes=e * stream,
        output_bytes=0.0,
    )
    token = float(STATISTIC[dtype] * s)
    # Activations are all-reduced in the products' dtype. Gradients are all-reduced at the norms' outputs, which are in
    # the wider dtype because each product casts its own input.
    forward_sums, backward_sums = (e * stream, e * stream), (m * stream, m * stream)
    if sequence:
        return _divided_sequence(model, (embedding, blocks[0], head), (e, m), size, token, loss_chunk is not None)
    block = share(blocks[0], replicated_block, size)
    if size > 1:  # an all-reduce works on a copy, and the bias is added after it
        block = replace(
            block,
            forward=replace(block.forward, traffic=block.forward.traffic + (4 * m + 8 * e) * stream),
            input_grad=replace(block.input_grad, traffic=block.input_grad.traffic + 4 * m * stream),
        )
    return (
        TensorRankWork(share(embedding, replicated_embedding, size), all_reduces(m * stream), ()),
        *(
            TensorRankWork(replace(block, name=work.name), all_reduces(*forward_sums), all_reduces(*backward_sums))
            for work in blocks
        ),
        TensorRankWork(share(head, replicated_head, size), all_reduces(token, 2 * token), all_reduces(m * stream)),
    )


def _divided_sequence(
    model: GptSpec, works: Sequence[LayerWork], widths: tuple[int, int], size: int, token: float, chunked: bool
) -> tuple[TensorRankWork, ...]:
    """Return the same where positions between divided layers are divided too (``divided_gpt``).

    A gather and a reduce-scatter copy what they exchange once, so that the shares of a rank lie together.

    Args:
        model: the GPT.
        works: an embedding, a block and the head, undivided.
        widths: bytes of a value of products, and of one between them.
        size: devices of the group.
        token: bytes of one number of each token that the loss exchanges.
        chunked: whether the loss is computed in chunks.
    """
    (embedding, block, head), (e, m), s, h = works, widths, model.sequence, model.hidden
    stream = float(s * h)

    def gathered(size_bytes: float) -> tuple[Exchange, Exchange]:
        return Exchange("all_gather", size_bytes), Exchange("reduce_scatter", size_bytes)

    # Each rank looks up all tokens in its rows, and its own positions.
    replicated = LayerWork(
        name="embedding",
        parameters=s * h,
        forward=TaskWork(traffic=2 * m * stream),
        input_grad=TaskWork(),
        weight_grad=TaskWork(traffic=2 * m * stream),
        kept_bytes=0.0,
        output_bytes=0.0,
    )
    first = TensorRankWork(share(embedding, replicated, size), gathered(m * stream)[1:], gathered(m * stream)[:1])
    replicated = LayerWork(
        name="block",
        parameters=6 * h,
        forward=TaskWork(operands=4 * e * stream, traffic=4 * (e + m) * stream),
        input_grad=TaskWork(operands=4 * e * stream, traffic=4 * (e + m) * stream),
        weight_grad=TaskWork(operands=4 * e * stream),
        kept_bytes=2 * e * stream,
        fused_operand_bytes=2 * e * stream,
        operand_bytes=2 * e * stream,
        waiting_bytes=4 * e * stream,
        output_bytes=0.0,
    )
    more = 4 * (e + m) * stream  # which no undivided block moves
    one = share(
        replace(
            block,
            forward=replace(block.forward, traffic=block.forward.traffic + more),
            input_grad=replace(block.input_grad, traffic=block.input_grad.traffic + more),
        ),
        replicated,
        size,
    )
    small = all_reduces(*(m * h,) * 6)  # gradients of norms and biases
    inside, between = gathered(m * stream), gathered(e * stream)
    ahead, back = (inside[0], between[1]) * 2, (between[0], inside[1]) * 2
    blocks = (TensorRankWork(replace(one, name=f"block.{i}"), ahead, (*back, *small)) for i in range(model.layers))
    replicated = LayerWork(
        name="head",
        parameters=2 * h,
        forward=TaskWork(operands=e * stream, traffic=2 * m * stream),
        input_grad=TaskWork(operands=e * stream, traffic=2 * m * stream),
        weight_grad=TaskWork(operands=e * stream),
        kept_bytes=e * stream * (1 + chunked) + 8 * s,
        fused_kept_bytes=8.0 * s,
        fused_operand_bytes=e * stream,
        waiting_bytes=e * stream,
        output_bytes=0.0,
    )
    last = TensorRankWork(
        share(head, replicated, size),
        (inside[0], *all_reduces(token, 2 * token)),
        (inside[1], *all_reduces(m * h, m * h)),
    )
    return first, *blocks, last


def share(work: LayerWork, replicated: LayerWork, size: int) -> LayerWork:
    """Return a rank's work: all of ``replicated``, and 1/size of the remainder."""
    result: dict[str, object] = {}
    for field in fields(LayerWork):
        a, b = getattr(work, field.name), getattr(replicated, field.name)
        if isinstance(a, TaskWork):
            parts: dict[str, Any] = {name: _part(getattr(a, name), getattr(b, name), size) for name in DIVIDED}
            fused = a.fused_traffic
            if fused is not None:
                fused = _part(fused, min(fused, b.traffic), size)
            products = tuple(product.shared(size) for product in a.products)
            result[field.name] = replace(a, **parts, fused_traffic=fused, products=products)
        elif field.name in ("parameters", "trained_parameters"):
            result[field.name] = None if a is None else round(_part(a, b or 0, size))
        elif isinstance(a, int | float):
            result[field.name] = _part(a, b or 0.0, size)
    return replace(work, **result)  # type: ignore[arg-type]


def _part(total: float, replicated: float, size: int) -> float:
    return replicated + (total - replicated) / size


def tensor_profile(
    model: GptSpec | Sequence[TensorRankWork],
    cluster: ClusterSpec,
    dtype: str,
    size: int,
    sizes: Sequence[int] = SIZES,
    *,
    sub_pipelined: bool = False,
    optimizer: str = "adamw",
    momentum: bool = False,
    tied: int = 0,
    trained_tied: int | None = None,
    compiled: bool = False,
    overlapped: bool = False,
    loss_chunk: int | None = None,
    sequence: bool = False,
) -> Profile:
    """Compute the profile of a cluster whose devices are tensor-parallel groups; see ``analytic_profile``.

    With ``sub_pipelined``, a micro-batch runs in two halves, and the all-reduces of one half overlap the compute of the
    other. A layer then takes twice the longer of a half's compute and a half's all-reduces. The start and the end of a
    stage, where there is no other half to overlap with, are neglected: a quarter of a layer each. The profile has only
    even micro-batch sizes, since only these can be halved.

    Args:
        model: the built-in GPT, or a tensor rank's share of any other model's layers.
        cluster: the machine.
        dtype: ``train.dtype``.
        size: devices of a group, T.
        sizes: micro-batch sizes, in samples.
        sub_pipelined: ``parallel.sub_pipelined``.
        optimizer, momentum: as in ``train``.
        tied: parameter values of a rank's share that first and last layer share; ignored for a GPT.
        trained_tied: those of ``tied`` that are trained; None: all.
        compiled: ``train.compile`` fuses kernels.
        overlapped: exchanges run beside the products that read or make their tensors, in as many parts as the group
            has devices, of which one has nothing beside it: user buffers of TransformerEngine, asynchronous tensor
            parallelism of PyTorch (Wang et al. 2023). Raypipe's own runtime has none of that.
        loss_chunk: ``train.loss_chunk_tokens``; of a GPT.
        sequence: ``parallel.sequence_parallel``; of a GPT.

    Raises:
        SpecError: the heads or the devices are not divisible by ``size``, or ``sub_pipelined`` without an even
            micro-batch size.
    """
    if cluster.devices % size:
        raise SpecError(
            "parallel.tensor",
            f"{cluster.devices} devices do not divide into groups of {size}",
            f"use a divisor of {cluster.devices}",
        )
    software = SOFTWARE[cluster.software]
    tensor_ranks = (
        divided_gpt(model, dtype, size, software, loss_chunk, sequence) if isinstance(model, GptSpec) else tuple(model)
    )
    if isinstance(model, GptSpec) and model.tie_embeddings:
        tied = tensor_ranks[-1].work.parameters - 2 * model.hidden
    if sub_pipelined:
        sizes = [n for n in sizes if n % 2 == 0]
    parts = sorted({n // 2 for n in sizes}) if sub_pipelined else sizes
    works = [m.work for m in tensor_ranks]
    plain = analytic_profile(works, cluster, dtype, parts, optimizer, momentum, compiled=compiled)
    layout = Layout.of(range(size), Hosts(cluster.devices_per_host))

    def exchanged(each: Sequence[Exchange], samples: int) -> float:
        return sum(collective_seconds(plain, one.kind, samples * one.bytes, layout) for one in each)

    def timed(layer: LayerProfile, tensor_rank: TensorRankWork) -> LayerProfile:
        times = {}
        for samples, t in layer.times.items():
            ahead, back = exchanged(tensor_rank.forward, samples), exchanged(tensor_rank.backward, samples)
            exchanges = {"forward": ahead, "recompute": ahead, "input_grad": back, "joint": back, "weight_grad": 0.0}
            if overlapped:
                taken = plain.communication_share
                total = {
                    name: max(getattr(t, name) + taken * added, added) + added / size
                    for name, added in exchanges.items()
                }
            elif sub_pipelined:
                total = {name: 2 * max(getattr(t, name), added) for name, added in exchanges.items()}
            else:
                total = {name: getattr(t, name) + added for name, added in exchanges.items()}
            times[samples * (1 + sub_pipelined)] = t.model_copy(update=total)
        return layer.model_copy(update={"times": times})

    # All ranks of a group send to their counterparts at the same time and share the host's links.
    senders = max(1.0, min(size, cluster.devices_per_host) / cluster.host_links)
    between = plain.between.model_copy(update={"beta_s_per_byte": plain.between.beta_s_per_byte * senders})
    return plain.model_copy(
        update={
            "layers": tuple(timed(*pair) for pair in zip(plain.layers, tensor_ranks, strict=True)),
            "base_bytes": plain.base_bytes + (plain.reserved.group_bytes if size > 1 else 0.0),
            "tied_parameters": tied,
            "trained_tied_parameters": trained_tied,
            "devices": cluster.devices // size,
            "devices_per_host": max(1, cluster.devices_per_host // size),
            "host_links": max(1, cluster.host_links // size),
            "between": between,
        }
    )
