"""Layers divided over a tensor group: what one member computes, holds and exchanges.

A group of T devices counts as one device here: its members work in step, so a task takes as long as one member's share
of it and the sums over the group inside it. So everything that reads a profile needs to know nothing about groups.

Source: Merak section 5.3 for what a layer exchanges (two sums forward, two back); Shoeybi et al. 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NamedTuple

from raypipe.cost.analytic import SIZES, analytic_profile
from raypipe.cost.collectives import Layout, collective_seconds
from raypipe.cost.gpt_work import RAYPIPE, STATISTIC, Software, gpt_work, mask_bytes, master_width
from raypipe.cost.profile import LayerProfile, Profile
from raypipe.cost.work import Effort, LayerWork
from raypipe.errors import SpecError
from raypipe.job.base import WIDTH
from raypipe.job.cluster import ClusterSpec
from raypipe.job.model_spec import GptSpec


class Member(NamedTuple):
    """One layer, as each member of the group has it."""

    work: LayerWork
    forward_sums: tuple[float, ...]
    """Bytes of each sum over the group in the forward of one sample."""
    backward_sums: tuple[float, ...]


def divided_gpt(model: GptSpec, dtype: str, size: int, software: Software = RAYPIPE) -> tuple[Member, ...]:
    """A member's share of each of a GPT's layers, in a group of ``size``.

    Norms, residual sums and dropout on the stream are whole on every member; so are the inputs of the first product of
    each pair and the outputs of the second.

    Raises:
        SpecError: the heads do not divide.
    """
    if model.heads % size:
        near = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
        fix = f"use one of {', '.join(map(str, near))}"
        raise SpecError("parallel.tensor", f"{model.heads} heads do not divide over {size}", fix)
    s, h = model.sequence, model.hidden
    e, m = WIDTH[dtype], master_width(dtype, software)
    stream = float(s * h)
    moved, kept = mask_bytes(e, software) if model.dropout else (0, 0)
    cast = 2 * (m + e) * stream if e != m else 0.0
    norms = 4 * m * stream + cast
    whole_block = LayerWork(
        name="block", parameters=6 * h,  # two norms, the biases behind the sums
        forward=Effort(operands=4 * e * stream, traffic=norms + 2 * (2 * m + e + moved) * stream),
        input_grad=Effort(operands=4 * e * stream, traffic=12 * m * stream + cast + 6 * e * stream * (moved > 0)),
        weight_grad=Effort(operands=4 * e * stream),
        kept_bytes=(2 * m + 2 * e + 2 * kept) * stream + 4 * STATISTIC[dtype] * s,
        waiting_bytes=4 * e * stream, output_bytes=m * stream,
    )  # fmt: skip
    embedding, *blocks, head = gpt_work(model, dtype, software)
    # Of the embedding, only the table is divided.
    whole_embedding = replace(
        embedding, parameters=s * h, weight_grad=replace(embedding.weight_grad, weights=0.0), workspace_fixed_bytes=0.0
    )
    whole_head = LayerWork(
        name="head", parameters=2 * h,
        forward=Effort(operands=e * stream, traffic=2 * m * stream + cast / 2),
        input_grad=Effort(operands=e * stream, traffic=3 * m * stream),
        weight_grad=Effort(operands=e * stream),
        kept_bytes=(m + e) * stream + (2 * STATISTIC[dtype] + 8) * s, waiting_bytes=e * stream, output_bytes=0.0,
    )  # fmt: skip
    token = float(STATISTIC[dtype] * s)
    pair = (e * stream, e * stream)
    block = share(blocks[0], whole_block, size)
    return (
        Member(share(embedding, whole_embedding, size), (m * stream,), ()),
        *(Member(replace(block, name=work.name), pair, pair) for work in blocks),
        Member(share(head, whole_head, size), (token, 2 * token), (e * stream,)),
    )


def share(work: LayerWork, whole: LayerWork, size: int) -> LayerWork:
    """A member's work: all of ``whole`` and its part of the rest. There are as many kernels as before."""
    found: dict[str, object] = {}
    for field in fields(LayerWork):
        a, b = getattr(work, field.name), getattr(whole, field.name)
        if isinstance(a, Effort):
            parts = {f.name: _part(getattr(a, f.name), getattr(b, f.name), size) for f in fields(Effort)}
            found[field.name] = Effort(**{**parts, "overhead": a.overhead})
        elif field.name == "parameters":
            found[field.name] = round(_part(a, b, size))
        elif isinstance(a, int | float):
            found[field.name] = _part(a, b or 0.0, size)
    return replace(work, **found)  # type: ignore[arg-type]


def _part(total: float, whole: float, size: int) -> float:
    return whole + (total - whole) / size


def tensor_profile(
    model: GptSpec,
    cluster: ClusterSpec,
    dtype: str,
    size: int,
    sizes: Sequence[int] = SIZES,
    *,
    sub_pipelined: bool = False,
    optimizer: str = "adamw",
    momentum: bool = False,
) -> Profile:
    """The profile of a cluster whose devices are groups of ``size``; see ``analytic_profile``.

    With ``sub_pipelined``, sums run beside the other half's compute: a layer takes as long as the longer of the two.
    The start and the end of a stage, where there is no other half, are left out: a quarter of a layer each.

    Raises:
        SpecError: the heads or the devices do not divide.
    """
    if cluster.devices % size:
        raise SpecError(
            "parallel.tensor", f"{cluster.devices} devices do not divide into groups of {size}", "use others"
        )
    members = divided_gpt(model, dtype, size)
    plain = analytic_profile([m.work for m in members], cluster, dtype, sizes, optimizer, momentum)
    layout = Layout.of(range(size), cluster.devices_per_host)

    def sums(each: Sequence[float], samples: int) -> float:
        return sum(collective_seconds(plain, "all_reduce", samples * one, layout) for one in each)

    def timed(layer: LayerProfile, member: Member) -> LayerProfile:
        times = {}
        for samples, t in layer.times.items():
            there, back = sums(member.forward_sums, samples), sums(member.backward_sums, samples)
            join = max if sub_pipelined else _added
            times[samples] = t.model_copy(
                update={
                    "forward": join(t.forward, there), "recompute": join(t.recompute, there),
                    "input_grad": join(t.input_grad, back), "joint": join(t.joint, back),
                }
            )  # fmt: skip
        return layer.model_copy(update={"times": times})

    # Equal members of neighbouring groups send at the same time, over as many links as there are.
    crowd = max(1.0, min(size, cluster.devices_per_host) / cluster.host_links)
    between = plain.between.model_copy(update={"beta_s_per_byte": plain.between.beta_s_per_byte * crowd})
    return plain.model_copy(
        update={
            "layers": tuple(timed(layer, member) for layer, member in zip(plain.layers, members, strict=True)),
            "tied_parameters": members[-1].work.parameters - 2 * model.hidden if model.tie_embeddings else 0,
            "devices": cluster.devices // size, "devices_per_host": max(1, cluster.devices_per_host // size),
            "host_links": max(1, cluster.host_links // size), "between": between,
        }
    )  # fmt: skip


def _added(a: float, b: float) -> float:
    return a + b
