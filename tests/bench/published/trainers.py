"""The work of a layer as a published row's trainer runs it, where raypipe has no key for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from raypipe.cost.layer_work import LayerWork, TaskWork
from raypipe.cost.tensor import TensorRankWork, all_reduces, share
from tests.bench.published.models import added

Recompute = Literal["none", "selective", "full"]
MASKED = (0.5, 0.31)
"""Rates of PyTorch's attention with an explicit mask, its memory-efficient kernels, over those of flash attention,
forward and backward. xFormers' pull request 362, which brought them: 5 and 55 % slower than the first FlashAttention.
That one reaches 30 to 50 and 25 to 35 % of an A100's peak, FlashAttention-2 up to 73 and 63 (Dao 2023, section 1)."""
FLEX = (0.9, 0.85)
"""The same of FlexAttention (PyTorch's blog, August 2024, "FlexAttention: The Flexibility of PyTorch with the
Performance of FlashAttention")."""
BIASES = {False: ((8, 6), (28, 40)), True: ((0, 2), (28, 40))}
"""Bytes, forward and backward, for each value of what experts' first and second products write, to add biases; True: in
Megatron, where the product adds the first ones and its backward sums them. ``_apply_bias`` of AutoModel and Megatron,
expert by expert: the bias times a float32 weight of the router (4), the sum (10), all joined (8) and cast (6); backward
a cast and one for the product (12), the parts joined (4), and two products that are summed (24). Without a weight, in
bfloat16: the sum and the join 8, and back the join and a sum 6."""
ROTATED = (14, 16)
"""Bytes that AutoModel's rotary embedding moves beyond a fused one's 4 for each value, forward and backward: four
products of halves 8, two sums 6, the join 4; backward the products 8, a sign 2, sums 6, the join 4
(``_apply_rotary_emb`` in models/gpt_oss/layers.py as of 89e3a9fdd, which brought its performance summary)."""
EAGER = (84, 152)
"""Bytes that transformers' two RMSNorms and residual sums of a block move for each value of the stream, forward and
backward: 36 a norm (to float32 6, square 8, mean 4, product 8, back 6, weight 4) and 6 a sum; backward 70 and 6."""


def checkpointed(work: LayerWork, arriving: float, how: Recompute) -> LayerWork:
    """Return a block whose activations are computed again in its own backward.

    ``full``: all but its input. ``selective``: torchtitan's selection by operation: attention's result, and that of
    every second product, are kept as well.
    """
    if how == "none" or not work.forward.products:
        return work
    forward, kept = work.forward, arriving
    if how == "selective":
        # Values of attention's result and its statistics are those of the block's stream and heads.
        saved = sum(2.0 * p.rows * p.columns for p in forward.products[::2])
        again = forward.products[1::2]
        kept += saved + arriving
        attention = forward.attention + forward.full_attention
        flops = sum(p.flops for p in again)
        forward = replace(
            forward,
            flops=flops,
            attention=0.0,
            full_attention=0.0,
            products=again,
            operands=forward.operands * flops / max(1.0, forward.flops - attention),
        )
    live = work.kept_bytes if work.fused_kept_bytes is None else work.fused_kept_bytes
    return replace(
        work,
        input_grad=added(forward, work.input_grad),
        kept_bytes=kept,
        fused_kept_bytes=kept,
        workspace_bytes=work.workspace_bytes + max(0.0, work.kept_bytes - kept),
        fused_workspace_bytes=(work.fused_workspace_bytes or work.workspace_bytes) + max(0.0, live - kept),
    )


def megatrons(work: LayerWork, head: bool) -> LayerWork:
    """Return a layer as Megatron runs it: gradients are summed in float32 by the products that make them, and its loss
    is a chain of operations in float32 (``_VocabParallelCrossEntropy``: 38 bytes a logit there, 14 back)."""
    result = replace(
        work, weight_grad=replace(work.weight_grad, weights=work.weight_grad.weights + 2.0 * work.parameters)
    )
    if not head:
        return result
    logits = float(work.forward.products[0].rows * work.forward.products[0].columns)
    there = replace(work.forward, traffic=38 * logits, fused_traffic=38 * logits)
    back = replace(work.input_grad, traffic=14 * logits, fused_traffic=14 * logits)
    return replace(result, forward=there, input_grad=back)


def attending(work: LayerWork, rates: tuple[float, float], masked: bool) -> LayerWork:
    """Return a layer whose attention goes at other rates, with the work that a mask hides if it is ``masked``."""

    def task(one: TaskWork, rate: float) -> TaskWork:
        # Hidden keys are computed, at the rate of attention without a mask; what is slower counts as more operations.
        causal, full = (0.0, 2 * one.attention / rate) if masked else (one.attention / rate, 0.0)
        more = causal + full - one.attention
        return replace(one, flops=one.flops + more, attention=causal, full_attention=one.full_attention + full)

    return replace(work, forward=task(work.forward, rates[0]), input_grad=task(work.input_grad, rates[1]))


def rotated(work: LayerWork, width: int) -> LayerWork:
    """Return a block that rotates queries and keys, together so wide, by eager kernels."""
    values = float(width * work.forward.positions)
    there, back = (moved * values for moved in ROTATED)
    return replace(work, forward=moving(work.forward, there), input_grad=moving(work.input_grad, back))


def biased(work: LayerWork, megatron: bool) -> LayerWork:
    """Return a layer whose experts, gated and as wide as the stream, have biases."""
    if work.experts is None:
        return work
    values = work.experts.rows * work.experts.row_bytes / 2
    there, back = (2 * values * first + values * second for first, second in zip(*BIASES[megatron], strict=True))
    return replace(work, forward=moving(work.forward, there), input_grad=moving(work.input_grad, back))


def moving(task: TaskWork, size: float) -> TaskWork:
    """Return a task that moves so many bytes more."""
    fused = None if task.fused_traffic is None else task.fused_traffic + size
    return replace(task, traffic=task.traffic + size, fused_traffic=fused)


def gathered(work: LayerWork) -> LayerWork:
    """Return a layer whose weights FSDP2 gathers: it copies them out of what was gathered, twice, and gradients into
    what is reduced, in float32."""
    values = float(work.parameters)
    there = replace(work.forward, weights=work.forward.weights + 2 * 2 * values)
    back = replace(work.input_grad, weights=work.input_grad.weights + (2 * 2 + 2 + 4) * values)
    return replace(work, forward=there, input_grad=back)


def divided(work: LayerWork, size: int, copied: bool, scattered: bool = True) -> TensorRankWork:
    """Return a rank's share where sequences are divided between a block's products (Korthikanti et al. 2022).

    Of each pair of products the second is divided along its inputs, and what lies between blocks along the sequence; so
    all of a block's work divides, and each all-reduce is a reduce-scatter and a gather, in the same time. Beside its
    share a rank has what was gathered for a product, and the gradient of it before it is scattered. ``copied``:
    sequences are the second dimension, and PyTorch's functional collectives copy what they gather or scatter along it.
    Not ``scattered``: what lies between them is on each rank, by eager kernels.
    """
    none = TaskWork(overhead=0.0)
    nothing = LayerWork(
        name="", parameters=0, forward=none, input_grad=none, weight_grad=none, kept_bytes=0.0, output_bytes=0.0
    )
    stream = work.output_bytes
    attends = work.forward.attention + work.forward.full_attention > 0
    if work.experts is not None:  # a rank sends its own tokens to experts, which it shares with nobody
        tasks = {
            name: replace(task, products=tuple(p._replace(divided=p.grows) if p.groups else p for p in task.products))
            for name in ("forward", "input_grad", "weight_grad")
            for task in [getattr(work, name)]
        }
        own = work.experts
        own = own._replace(rows=own.rows // size, parameters=own.parameters // size)
        work = replace(work, **tasks, experts=own)
    shared = share(work, nothing, size)
    whole = 2 * stream * (1 - 1 / size) if attends else 0.0
    shared = replace(
        shared,
        workspace_bytes=shared.workspace_bytes + whole,
        fused_workspace_bytes=(shared.fused_workspace_bytes or shared.workspace_bytes) + whole,
    )
    sums = (stream, stream) if attends else (stream,) * bool(stream)
    if copied and attends:  # two of each, read and written
        shared = replace(
            shared, forward=moving(shared.forward, 8 * stream), input_grad=moving(shared.input_grad, 8 * stream)
        )
    if not scattered and attends:
        there, back = (moved * (1 - 1 / size) * stream / 2 for moved in EAGER)
        again = there * (work.kept_bytes <= stream)  # recomputed with its block
        shared = replace(
            shared, forward=moving(shared.forward, there), input_grad=moving(shared.input_grad, back + again)
        )
    return TensorRankWork(shared, all_reduces(*sums), all_reduces(*sums) if attends else ())
