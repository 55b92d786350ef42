"""A GPT's layers as work: embedding, blocks, head, as ``models/gpt.py`` and the runtime run them.

Counted kernel by kernel, so that memory comes out to a few bytes a token. For comparison: Korthikanti et al. 2022
(arXiv:2205.05198, section 4.1) count ``s*h*(34 + 5*a*s/h)`` bytes a block for 16-bit Megatron. Here attention is
fused, so its s x s scores are never written and their part is gone; the residual stream and what the norms read stay
wide under autocast; a dropout mask is a number, not a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raypipe.cost.layer_work import Effort, LayerWork
from raypipe.job.field_types import WIDTH
from raypipe.job.model_spec import GptSpec

STATISTIC = {"float32": 4, "float64": 8, "bfloat16": 4, "float16": 4}
"""Bytes of a norm's mean, of attention's log-sum-exp, of a log-probability."""
FUSED_BACKWARD = 2.5
"""Attention's backward in forwards: four products where the forward has two, and the scores once more (Dao et al.
2022, FlashAttention, appendix B.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """How a framework runs a GPT, as far as its costs go."""

    fused_attention: bool = True
    """Else the scores of all heads are written and kept, and masked ones are computed too."""
    keyed_dropout: bool = True
    """raypipe's: masks hashed from keys, as wide as the values. Else one kernel and a byte a value, scores too."""
    fused_tanh_gelu: bool = True
    """Else ``activation: gelu-tanh`` is written out in elementary operations, of whose results four are kept instead of
    one. The exact GELU is one kernel in every PyTorch since 1.0."""
    fused_copies: bool = True
    """Else biases and the heads' layout are written as copies of their own."""
    autocast: bool = True
    """16-bit products over float32 weights and stream. Else everything is as narrow as the products."""


RAYPIPE = Software()
PYTORCH_2020 = Software(fused_attention=False, keyed_dropout=False, fused_tanh_gelu=False, fused_copies=False)
"""PyTorch 1 with a BERT of those years; see ``tests/cost/test_published_blocks.py`` for how it fits."""
MEGATRON = Software(keyed_dropout=False, autocast=False)
"""Fused kernels on narrow weights, as ZeroPP's own code base must be by the memory that it takes."""
SOFTWARE: dict[str, Software] = {"raypipe": RAYPIPE, "pytorch-2020": PYTORCH_2020, "megatron": MEGATRON}
"""By the name that a cluster file gives it."""


def gpt_work(model: GptSpec, dtype: str, software: Software = RAYPIPE) -> Sequence[LayerWork]:
    """``layers + 2`` layers of a job's model: ``embedding``, ``block.0``, ..., ``head``.

    Args:
        model: its shape.
        dtype: ``train.dtype``; 16-bit ones are autocast over float32 weights.
        software: what runs it.
    """
    block = _block(model, dtype, software)
    blocks = [replace(block, name=f"block.{i}") for i in range(model.layers)]
    return (_embedding(model, dtype, software), *blocks, _head(model, dtype, software))


def master_width(dtype: str, software: Software) -> int:
    """Bytes of a parameter and of a value of the residual stream."""
    return 4 if WIDTH[dtype] == 2 and software.autocast else WIDTH[dtype]


def mask_bytes(width: int, software: Software) -> tuple[int, int]:
    """Bytes that dropout moves and keeps per value.

    Keyed: hashing in int32, each for two values, then the mask, then the product; see ``models/keyed_random.py``.
    """
    hashing = 58
    return (hashing + 3 + 1 + width + 2 * width + 3 * width, width) if software.keyed_dropout else (2 * width + 1, 1)


def _block(model: GptSpec, dtype: str, software: Software) -> LayerWork:
    s, h, heads = model.sequence, model.hidden, model.heads
    e, m, stat = WIDTH[dtype], master_width(dtype, software), STATISTIC[dtype]
    stream = s * h  # values of the residual stream, of one sample
    drop = 2 if model.dropout else 0  # both on the stream
    mask_moved, mask_kept = mask_bytes(e, software)
    gelu = 1 if software.fused_tanh_gelu or model.activation == "gelu" else 4
    narrow = e != m
    matrices = 12 * h * h

    # The four products: inputs of 1 + 1 + 1 + 4 streams, outputs of 3 + 1 + 4 + 1.
    linear, operands = 24.0 * stream * h, 16.0 * e * stream
    # Casts are charged to every micro-batch: the runtime makes them once a step, but again where it recomputes.
    weights = float(matrices * e + (matrices * (m + e) if narrow else 0))
    norm_cast = 2 * (m + e) * stream if narrow else 0
    # Norms, GELU (in elementary operations: eight instead of one, twice as many bytes back), sums with the stream.
    forward = 4 * m * stream + norm_cast + 8 * e * stream * (2 * gelu if gelu > 1 else 1) + 2 * (2 * m + e) * stream
    forward += drop * mask_moved * stream
    if not software.fused_copies:
        forward += (2 * 9 + 2 * 4) * e * stream  # a bias into each output; queries, keys, values, heads' outputs
    backward = 6 * m * stream + norm_cast + 12 * e * stream * (2 * gelu if gelu > 1 else 1) + 6 * m * stream
    backward += 3 * drop * e * stream
    kept = (2 * m + 10 * e + 4 * e * gelu + drop * mask_kept) * stream + 4 * stat * s
    if software.fused_attention:
        attention, attention_back = 2.0 * s * stream, FUSED_BACKWARD * 2.0 * s * stream
        forward += 4 * e * stream
        backward += 8 * e * stream
        kept += heads * stat * s
        scores = 0
    else:
        attention, attention_back = 4.0 * s * stream, 8.0 * s * stream
        scores = heads * s * s
        # Written by the product, scaled and masked, softmax, dropout, read by the product; the way back likewise.
        forward += 8 * e * scores + (2 * e + 1) * scores * (drop > 0)
        backward += 9 * e * scores + (2 * e + 1) * scores * (drop > 0)
        kept += (e + (e + 1 if drop else 0)) * scores
    return LayerWork(
        name="block", parameters=matrices + 13 * h,  # biases of 3 + 1 + 4 + 1, two norms of 2 each
        forward=Effort(flops=linear + attention, operands=operands, weights=weights, traffic=forward),
        input_grad=Effort(
            flops=linear + attention_back, operands=operands, weights=weights, traffic=backward, overhead=0.8
        ),
        weight_grad=Effort(
            flops=linear, operands=operands, weights=3.0 * matrices * m, traffic=9.0 * e * stream, overhead=0.3
        ),
        kept_bytes=kept, cast_bytes=matrices * e if narrow else 0,
        waiting_bytes=16.0 * e * stream,  # both sides of the four products
        output_bytes=m * stream,
        # The MLP's inner gradient, or attention's; then a matrix gradient before it is added to the sum.
        workspace_bytes=max(4.0 * e * stream, 2.0 * e * scores),
        workspace_fixed_bytes=4.0 * h * h * (m + e if narrow else m),
        split_workspace_bytes=max(8.0 * e * stream, 2.0 * e * scores),
    )  # fmt: skip


def _embedding(model: GptSpec, dtype: str, software: Software) -> LayerWork:
    s, h = model.sequence, model.hidden
    m = master_width(dtype, software)
    table = model.vocabulary * h
    moved, held = mask_bytes(m, software) if model.dropout else (0, 0)
    return LayerWork(
        name="embedding", parameters=table + (model.positions or s) * h,
        forward=Effort(traffic=(5.0 * m + moved) * s * h, overhead=0.3),
        input_grad=Effort(traffic=3.0 * m * s * h if model.dropout else 0.0, overhead=0.1),
        # The gradient of a look-up is a whole table of mostly zeros, added to the sum.
        weight_grad=Effort(traffic=3.0 * m * s * h, weights=4.0 * m * table, overhead=0.3),
        kept_bytes=held * s * h + 8 * s,
        waiting_bytes=m * s * h + 8 * s,
        output_bytes=m * s * h,
        workspace_fixed_bytes=m * table, split_workspace_bytes=0,
    )  # fmt: skip


def _head(model: GptSpec, dtype: str, software: Software) -> LayerWork:
    s, h, logits = model.sequence, model.hidden, model.sequence * model.vocabulary
    e, m, stat = WIDTH[dtype], master_width(dtype, software), STATISTIC[dtype]
    narrow = e != m
    matrix = model.vocabulary * h
    product = Effort(
        flops=2.0 * s * h * model.vocabulary,
        operands=float(e * (s * h + logits)),
        weights=float(matrix * e + (matrix * (m + e) if narrow else 0)),
    )
    norm = 2 * m * s * h + ((m + e) * s * h if narrow else 0)
    loss = (e + stat if narrow else 0) * logits + 2 * stat * logits  # widen, then log-softmax
    return LayerWork(
        name="head", parameters=matrix + 2 * h,
        forward=Effort(
            flops=product.flops, operands=product.operands, weights=product.weights, traffic=norm + loss, overhead=0.4
        ),
        input_grad=Effort(
            flops=product.flops, operands=product.operands, weights=product.weights, overhead=0.4,
            traffic=3 * m * s * h + 4 * stat * logits,
        ),
        weight_grad=Effort(flops=product.flops, operands=product.operands, weights=3.0 * m * matrix, overhead=0.3),
        kept_bytes=m * s * h + e * s * h + stat * logits + 2 * stat * s + 8 * s,
        cast_bytes=matrix * e if narrow else 0,
        waiting_bytes=e * (s * h + logits),
        output_bytes=0,
        # Gradients of the log-probabilities and of the logits; the matrix's comes when they are gone again.
        workspace_bytes=2.0 * stat * logits,
        workspace_fixed_bytes=max(0.0, matrix * (m + e if narrow else m) - 2.0 * stat * logits),
        split_workspace_bytes=2.0 * stat * logits,
    )  # fmt: skip
