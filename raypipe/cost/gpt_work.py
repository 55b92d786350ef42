"""The work of a GPT's layers (embedding, blocks, head) as ``models/gpt.py`` and the runtime run them.

It is counted kernel by kernel, so that memory is exact to a few bytes per token. For comparison: Korthikanti et al.
2022 (arXiv:2205.05198, section 4.1) count ``s*h*(34 + 5*a*s/h)`` bytes per block for 16-bit Megatron. Here attention is
fused, so its s x s scores are never written and their term is absent; the residual stream and the norms' inputs stay
float32 under autocast; a dropout mask is as wide as a value, not a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raypipe.cost.layer_work import LayerWork, LinearHead, TaskWork, linear_products, with_head
from raypipe.job.field_types import FP8, WEIGHT_WIDTH, WIDTH
from raypipe.job.model_spec import GptSpec

STATISTIC = {"float32": 4, "float64": 8, "bfloat16": 4, "float16": 4, "bfloat16-true": 4, FP8: 4}
"""Bytes of one value of a norm's mean, of attention's log-sum-exp, or of a log-probability."""
FUSED_BACKWARD = 2.5
"""FLOPs of fused attention's backward over its forward's: four products instead of two, and the scores recomputed (Dao
et al. 2022, FlashAttention, appendix B.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The properties of a framework that affect the costs of a GPT."""

    fused_attention: bool = True
    """Attention is fused. Otherwise the scores of all heads are written and kept, and masked ones are computed too."""
    keyed_dropout: bool = True
    """Dropout masks are hashed from keys and as wide as the values, as in raypipe. Otherwise dropout is one kernel with
    a mask of one byte per value, and also applies to attention's scores."""
    fused_tanh_gelu: bool = True
    """``activation: gelu-tanh`` is one kernel. Otherwise it is a chain of elementary operations that keeps four results
    instead of one. The exact GELU is one kernel in every PyTorch since 1.0."""
    fused_copies: bool = True
    """Biases and layout changes of the heads are fused into other kernels. Otherwise they are separate copies."""
    autocast: bool = True
    """Products are 16-bit over float32 weights and residual stream. Otherwise everything has the products' dtype."""
    attention: str = "flash"
    """Which of a device's attention kernels runs (``DeviceModel.attention``)."""
    cast_bytes: int = 6
    """Bytes to cast an activation or gradient to FP8: it is read in bfloat16 for its largest value, read again, and
    written twice, once transposed for the weight gradient (torchao, ``testing/training/roofline_utils.py``,
    tensorwise). TransformerEngine's delayed scaling takes the largest value of earlier steps. Weights are cast once a
    step."""


RAYPIPE = Software()
PYTORCH_2020 = Software(fused_attention=False, keyed_dropout=False, fused_tanh_gelu=False, fused_copies=False)
"""PyTorch 1 as of 2020; ``tests/cost/test_published.py`` compares it with published figures."""
MEGATRON = Software(keyed_dropout=False, autocast=False, attention="cudnn", cast_bytes=4)
"""Fused kernels on 16-bit weights; the memory reported for ZeroPP's code base implies that it works this way."""
SOFTWARE: dict[str, Software] = {"raypipe": RAYPIPE, "pytorch-2020": PYTORCH_2020, "megatron": MEGATRON}
"""Software by the name that a cluster file uses."""


def gpt_work(
    model: GptSpec, dtype: str, software: Software = RAYPIPE, loss_chunk: int | None = None
) -> Sequence[LayerWork]:
    """Return the work of a GPT's ``layers + 2`` layers: ``embedding``, ``block.0``, ..., ``head``.

    Args:
        model: the model's shape.
        dtype: ``train.dtype``; ``bfloat16`` and ``float16`` are autocast over float32 weights.
        software: the framework that runs the model.
        loss_chunk: ``train.loss_chunk_tokens``.
    """
    block = _block(model, dtype, software)
    blocks = [replace(block, name=f"block.{i}") for i in range(model.layers)]
    return (_embedding(model, dtype, software), *blocks, _head(model, dtype, software, loss_chunk))


def master_width(dtype: str, software: Software) -> int:
    """Return the bytes of a parameter and of a value of the residual stream."""
    return WEIGHT_WIDTH[dtype] if software.autocast else WIDTH[dtype]


def mask_bytes(width: int, software: Software) -> tuple[int, int]:
    """Return the bytes that dropout moves and the bytes that it keeps, per value.

    Keyed dropout hashes int32 numbers, one for two values, then makes the mask, then multiplies; see
    ``models/keyed_random.py``.
    """
    hashing = 58
    return (hashing + 3 + 1 + width + 2 * width + 3 * width, width) if software.keyed_dropout else (2 * width + 1, 1)


def _block(model: GptSpec, dtype: str, software: Software) -> LayerWork:
    s, h, heads = model.sequence, model.hidden, model.heads
    e, m, stat = WIDTH[dtype], master_width(dtype, software), STATISTIC[dtype]
    stream = s * h  # values of the residual stream, of one sample
    drop = 2 if model.dropout else 0  # a block has two dropouts, both on the residual stream
    mask_moved, mask_kept = mask_bytes(e, software)
    gelu = 1 if software.fused_tanh_gelu or model.activation == "gelu" else 4
    narrow = e != m
    matrices = 12 * h * h

    # The inputs of the four products are 1 + 1 + 1 + 4 streams wide, their outputs 3 + 1 + 4 + 1.
    linear, operands = 24.0 * stream * h, 16.0 * e * stream
    # Weight casts are charged to every micro-batch: the runtime casts once a step, but again where it recomputes.
    weights = float(matrices * e + (matrices * (m + e) if narrow else 0))
    norm_cast = 2 * (m + e) * stream if narrow else 0
    # Norms; GELU (unfused, eight operations instead of one, and twice the traffic in the backward); residual sums.
    forward = 4 * m * stream + norm_cast + 8 * e * stream * (2 * gelu if gelu > 1 else 1) + 2 * (2 * m + e) * stream
    forward += drop * mask_moved * stream
    if not software.fused_copies:
        forward += (2 * 9 + 2 * 4) * e * stream  # biases of all outputs; copies of queries, keys, values and outputs
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
        # Scores are written by the product, scaled, masked, softmaxed, dropped out and read; likewise in the backward.
        forward += 8 * e * scores + (2 * e + 1) * scores * (drop > 0)
        backward += 9 * e * scores + (2 * e + 1) * scores * (drop > 0)
        kept += (e + (e + 1 if drop else 0)) * scores
    ahead, inputs, grads = zip(
        linear_products(s, h, 3 * h),
        linear_products(s, h, h, second=True),
        linear_products(s, h, 4 * h),
        linear_products(s, 4 * h, h, second=True),
        strict=True,
    )
    # Fused: norm; sum and norm; GELU; sum. The backward computes them again: it reads inputs and gradients of outputs,
    # and writes gradients of inputs. The outputs of norms and of the GELU are kept for the products alone. A mask is
    # written once and read once.
    fused, masks = not scores, drop * mask_kept
    fused_forward = ((m + e) + (2 * m + e + m + e) + 8 * e + (2 * m + e) + masks) * stream if fused else None
    fused_backward = ((e + 2 * m) + (2 * e + 4 * m) + 12 * e + 2 * m + masks) * stream if fused else None
    return LayerWork(
        name="block",
        parameters=matrices + 13 * h,  # biases of 3 + 1 + 4 + 1, two norms of 2 each
        forward=TaskWork(
            flops=linear + attention,
            operands=operands,
            weights=weights,
            traffic=forward,
            fused_traffic=fused_forward,
            attention=attention,
            positions=s,
            head=h // heads,
            products=ahead,
            quantized=7.0 * stream,
        ),
        input_grad=TaskWork(
            flops=linear + attention_back,
            operands=operands,
            weights=weights,
            traffic=backward,
            fused_traffic=fused_backward,
            overhead=0.8,
            attention=attention_back,
            positions=s,
            head=h // heads,
            products=inputs,
            quantized=9.0 * stream,
        ),
        weight_grad=TaskWork(
            flops=linear,
            operands=operands,
            weights=3.0 * matrices * m,
            traffic=9.0 * e * stream,
            fused_traffic=0.0,  # sums of biases' gradients join other kernels
            overhead=0.3,
            products=grads,
        ),
        kept_bytes=kept,
        fused_kept_bytes=(2 * m + 8 * e + masks) * stream + (heads + 4) * stat * s if fused else None,
        fused_operand_bytes=6.0 * e * stream,
        cast_bytes=matrices * e if narrow else 0,
        waiting_bytes=16.0 * e * stream,  # both sides of the four products
        output_bytes=m * stream,
        # The gradient inside the MLP or attention; fixed: a matrix's gradient before it is accumulated.
        workspace_bytes=max(4.0 * e * stream, 2.0 * e * scores),
        workspace_fixed_bytes=4.0 * h * h * (m + e if narrow else m),
        split_workspace_bytes=max(8.0 * e * stream, 2.0 * e * scores),
        operand_bytes=9.0 * e * stream,
        key_value_bytes=2.0 * e * stream,
    )


def _embedding(model: GptSpec, dtype: str, software: Software) -> LayerWork:
    s, h = model.sequence, model.hidden
    m = master_width(dtype, software)
    table = model.vocabulary * h
    moved, kept = mask_bytes(m, software) if model.dropout else (0, 0)
    return LayerWork(
        name="embedding",
        parameters=table + (model.positions or s) * h,
        forward=TaskWork(traffic=(5.0 * m + moved) * s * h, overhead=0.3),
        input_grad=TaskWork(traffic=3.0 * m * s * h if model.dropout else 0.0, overhead=0.1),
        # The gradient of a look-up is a full table, mostly zeros, that is accumulated.
        weight_grad=TaskWork(traffic=3.0 * m * s * h, weights=4.0 * m * table, overhead=0.3),
        kept_bytes=kept * s * h + 8 * s,
        waiting_bytes=m * s * h + 8 * s,
        output_bytes=m * s * h,
        workspace_fixed_bytes=m * table,
        split_workspace_bytes=0,
    )


def _head(model: GptSpec, dtype: str, software: Software, loss_chunk: int | None) -> LayerWork:
    s, h, logits = model.sequence, model.hidden, model.sequence * model.vocabulary
    e, m, stat = WIDTH[dtype], master_width(dtype, software), STATISTIC[dtype]
    narrow = e != m
    matrix = model.vocabulary * h
    norm = 2 * m * s * h + ((m + e) * s * h if narrow else 0)
    if loss_chunk is not None:
        kept = m * s * h + e * s * h + 2 * stat * s
        rest = LayerWork(
            name="head",
            parameters=matrix + 2 * h,
            forward=TaskWork(traffic=float(norm), overhead=0.0),
            input_grad=TaskWork(traffic=3.0 * m * s * h, overhead=0.4),
            weight_grad=TaskWork(overhead=0.0),
            kept_bytes=kept,
            output_bytes=0,
            waiting_bytes=0.0,
            split_workspace_bytes=0.0,
        )
        sizes = LinearHead(
            chunk=loss_chunk, tokens=s, inputs=h, rows=model.vocabulary, width=e, master=m, statistic=stat
        )
        return with_head(rest, sizes)
    ahead, inputs, grads = linear_products(s, h, model.vocabulary, linear=False)
    product = TaskWork(
        flops=2.0 * s * h * model.vocabulary,
        operands=float(e * (s * h + logits)),
        weights=float(matrix * e + (matrix * (m + e) if narrow else 0)),
    )
    loss = (e + stat if narrow else 0) * logits + 2 * stat * logits  # widen, then log-softmax
    return LayerWork(
        name="head",
        parameters=matrix + 2 * h,
        forward=TaskWork(
            flops=product.flops,
            operands=product.operands,
            weights=product.weights,
            traffic=norm + loss,
            overhead=0.4,
            products=(ahead,),
        ),
        input_grad=TaskWork(
            flops=product.flops,
            operands=product.operands,
            weights=product.weights,
            overhead=0.4,
            traffic=3 * m * s * h + 4 * stat * logits,
            products=(inputs,),
        ),
        weight_grad=TaskWork(
            flops=product.flops, operands=product.operands, weights=3.0 * m * matrix, overhead=0.3, products=(grads,)
        ),
        kept_bytes=m * s * h + e * s * h + stat * logits + 2 * stat * s + 8 * s,
        cast_bytes=matrix * e if narrow else 0,
        fused_kept_bytes=m * s * h + e * logits + 4 * stat * s + 8 * s,
        fused_operand_bytes=float(e * s * h),
        waiting_bytes=e * (s * h + logits),
        output_bytes=0,
        # Gradients of log-probabilities and logits; they are freed before the matrix's gradient is computed.
        workspace_bytes=2.0 * stat * logits,
        workspace_fixed_bytes=max(0.0, matrix * (m + e if narrow else m) - 2.0 * stat * logits),
        split_workspace_bytes=2.0 * stat * logits,
        operand_bytes=float(e * logits),
    )
