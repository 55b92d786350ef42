"""The work of a layer for one sample, in operations and bytes: the costs of a model before a machine is chosen.

Sizes are in bytes, and a multiply-add counts as two operations. Everything grows with the number of samples except
fields named fixed or weights. ``cost.kernels`` says how long a device takes for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from raypipe.job.field_types import Count, Positive, Spec


class Product(NamedTuple):
    """A matrix product of one sample: ``rows x depth`` times ``depth x columns``."""

    rows: int
    columns: int
    depth: int
    grows: Literal["rows", "depth"] = "rows"
    """The dimension that further samples of a micro-batch are added to."""
    linear: bool = False
    """It is a product of a linear layer inside the model, which ``train.dtype: fp8`` computes in FP8. The head is
    none: TransformerEngine's and torchao's users keep it in bfloat16."""
    divided: Literal["rows", "columns", "depth"] = "columns"
    """The dimension that tensor parallelism divides."""
    groups: int = 0
    """Experts among which the dimension that grows is divided evenly, each with a matrix of its own: a grouped product.
    0: no experts."""

    @property
    def flops(self) -> float:
        """Return the operations, for one sample."""
        return 2.0 * self.rows * self.columns * self.depth

    def shared(self, size: int) -> Product:
        """Return a tensor rank's share in a group of ``size``."""
        return self._replace(**{self.divided: max(1, getattr(self, self.divided) // size)})

    def of_experts(self, size: int, imbalance: float) -> Product:
        """Return the share of the busiest of ``size`` devices that divide experts: rows of all, for fewer experts."""
        if not self.groups:
            return self
        grown = round(getattr(self, self.grows) * imbalance)
        return self._replace(**{self.grows: grown, "groups": max(1, self.groups // size)})


def linear_products(
    tokens: int, inputs: int, outputs: int, second: bool = False, linear: bool = True, groups: int = 0
) -> tuple[Product, Product, Product]:
    """Return the products of a linear layer's forward, input gradient and weight gradient.

    Args:
        tokens: rows of one sample.
        inputs, outputs: width of what it reads and writes.
        second: of a pair of layers that tensor parallelism divides, it is the one whose input is divided.
        linear, groups: see ``Product``.
    """
    return (
        Product(tokens, outputs, inputs, "rows", linear, "depth" if second else "columns", groups),
        Product(tokens, inputs, outputs, "rows", linear, "columns" if second else "depth", groups),
        Product(outputs, inputs, tokens, "depth", linear, "columns" if second else "rows", groups),
    )


def newton_schulz_flops(rows: int, columns: int, steps: int = 5) -> float:
    """Return the operations of Muon's iteration on a matrix: three products in each of torch's five steps.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", Newton-Schulz of degree 5.

    >>> newton_schulz_flops(2, 4)
    400.0
    """
    short, long = sorted((rows, columns))
    return float(steps * (4 * short**2 * long + 2 * short**3))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskWork:
    """The work of one task of one layer."""

    flops: float = 0.0
    """Operations of its matrix products and of its attention, per sample."""
    operands: float = 0.0
    """Bytes of activations that the products read and write, per sample."""
    weights: float = 0.0
    """Bytes of parameters and their gradients that are read and written, whatever the size of the micro-batch."""
    traffic: float = 0.0
    """Bytes that memory-bound kernels read and write, per sample: norms, activations, sums, attention's softmax."""
    fused_traffic: float | None = None
    """``traffic`` where chains of such kernels are fused, as a compiler does; None: as much."""
    attention: float = 0.0
    """The part of ``flops`` that is causal attention."""
    full_attention: float = 0.0
    """The part of ``flops`` that is fused attention without a causal mask."""
    positions: int = 0
    """Keys of each sequence that attention reads."""
    head: int = 0
    """Width of a head of attention; 0: not known."""
    overhead: float = 1.0
    """Time of launches and half-filled kernels, relative to the overhead of a transformer block's forward."""
    fused_overhead: float | None = None
    """``overhead`` where kernels are fused; None: as much."""
    products: tuple[Product, ...] = ()
    """The products of which ``flops`` knows the shapes."""
    quantized: float = 0.0
    """Values of activations, or of gradients, that FP8 products need cast, per sample."""

    @property
    def attention_operations(self) -> float:
        """The share of the products' operations that is causal attention."""
        return self.attention / self.flops if self.flops else 0.0


class ExpertsWork(NamedTuple):
    """The experts of a layer: what of its work goes by the tokens that a router sends them."""

    experts: int
    """Experts of the layer, of all devices that divide them."""
    per_token: int
    """Experts that the router chooses for a token, k."""
    rows: int
    """Rows of one sample that experts compute: its tokens times k."""
    row_bytes: float
    """Bytes of a token's vector on its way to an expert, and back."""
    parameters: int
    """The layer's parameters that are experts'."""
    trained: bool = True
    traffic: float = 0.0
    """Share of the forward's ``traffic`` that is of these rows."""
    back_traffic: float = 0.0
    """The same of the input gradient's."""
    kept: float = 0.0
    """The same of ``kept_bytes``."""
    fixed_beside: float = 0.0
    """``workspace_fixed_bytes`` of all but the experts."""

    @property
    def tokens(self) -> float:
        """Return the tokens of one sample."""
        return self.rows / self.per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """The work and memory of one layer. See ``LayerProfile`` for the fields of the same name."""

    name: str
    parameters: int
    trained_parameters: int | None = None
    forward: TaskWork
    input_grad: TaskWork
    weight_grad: TaskWork
    kept_bytes: float
    fused_kept_bytes: float | None = None
    """``kept_bytes`` where a compiler fuses kernels and computes their results again; None: as much."""
    fused_operand_bytes: float = 0.0
    """What products read of fused kernels' results, which torch's min-cut keeps beside that."""
    unread_input_bytes: float = 0.0
    kept_fixed_bytes: float = 0.0
    cast_bytes: float = 0.0
    waiting_bytes: float | None = None
    output_bytes: float
    output_floats: float | None = None
    workspace_bytes: float = 0.0
    fused_workspace_bytes: float | None = None
    """``workspace_bytes`` where kernels are fused; None: as much."""
    workspace_fixed_bytes: float = 0.0
    split_workspace_bytes: float | None = None
    operand_bytes: float = 0.0
    """Gradients of the results of products with trained weights. A compiled backward is one program, which makes the
    weights' gradients at its end, of these and of what was kept."""
    chunk_bytes: float = 0.0
    key_value_bytes: float = 0.0
    experts: ExpertsWork | None = None
    """The layer's experts, if it is a mixture of them: those that are here."""
    exchanged_bytes: float = 0.0

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Return rows and columns of the trained matrices of its linear layers, experts' and heads' left out."""
        return tuple((p.rows, p.columns) for p in self.weight_grad.products if p.linear and not p.groups)


# A linear head whose loss is computed chunk by chunk (``runtime/backward/chunked_loss.py``).


class LinearHead(Spec):
    """The sizes of a linear head and of its loss."""

    rows: Positive
    """Of its matrix: classes."""
    tokens: Positive
    """Of one sample."""
    inputs: Positive
    """Values that it reads of one token."""
    width: Positive
    """Bytes of a value that its product reads or writes."""
    master: Positive
    """Bytes of a parameter."""
    statistic: Positive
    """Bytes of a value of the loss."""
    chunk: Positive | None = None
    """``train.loss_chunk_tokens``: tokens whose logits are there at once; None: all of a sample."""
    scales: Count = 0
    """Operations that work on every logit by itself."""


def with_head(rest: LayerWork, head: LinearHead) -> LayerWork:
    """Add the head to the work of a last layer without its product and loss.

    ``rest`` keeps what the head reads, and has the head's parameters. The forward makes logits and the gradient of what
    the head reads, the weight gradient makes the logits again.
    """
    e, stat, stream = head.width, head.statistic, head.tokens * head.inputs
    logits, matrix = head.tokens * head.rows, head.inputs * head.rows
    ahead, inputs, grads = linear_products(head.tokens, head.inputs, head.rows, linear=False)
    narrow = e != head.master
    weights = float(matrix * e + (matrix * (head.master + e) if narrow else 0))
    scaled = 2 * head.scales * e * logits
    forward = (e + stat if narrow else 0) * logits + 2 * stat * logits + scaled  # widen, then log-softmax
    backward = 4 * stat * logits + scaled
    operands = 2.0 * e * (stream + logits)
    ahead_work, weight_work = rest.forward, rest.weight_grad
    return replace(
        rest,
        forward=replace(
            ahead_work,
            flops=ahead_work.flops + 2 * ahead.flops,
            operands=ahead_work.operands + operands,
            weights=ahead_work.weights + 2 * weights,
            traffic=ahead_work.traffic + forward + backward,
            overhead=ahead_work.overhead + 0.8,
            products=(*ahead_work.products, ahead, inputs),
        ),
        input_grad=replace(rest.input_grad, traffic=rest.input_grad.traffic + 3 * e * stream),
        weight_grad=replace(
            weight_work,
            flops=weight_work.flops + 2 * ahead.flops,
            operands=weight_work.operands + operands,
            weights=weight_work.weights + weights + 3.0 * head.master * matrix,
            traffic=weight_work.traffic + forward + backward,
            overhead=weight_work.overhead + 0.8,
            products=(*weight_work.products, ahead, grads),
        ),
        kept_bytes=rest.kept_bytes + e * stream + 8 * head.tokens,
        cast_bytes=rest.cast_bytes + (matrix * e if narrow else 0),
        waiting_bytes=(rest.waiting_bytes or 0.0) + e * stream + 8 * head.tokens,
        workspace_fixed_bytes=max(rest.workspace_fixed_bytes, float(matrix * (head.master + (e if narrow else 0)))),
        # Logits, log-probabilities, and the gradients of both.
        chunk_bytes=float((head.chunk or head.tokens) * head.rows * (e * (1 + head.scales) + 3 * stat)),
    )
