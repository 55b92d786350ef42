"""Costs of single operations, from their names and shapes: FLOPs and saved tensors.

Two tables of torch's are restated here, since the planner counts without torch and at sizes that are symbolic while a
model is captured; tests hold them against what torch does.

A multiply-add of a matrix product or convolution counts two; other operations count one per value written. Of causal
attention, only the half of the scores that is not masked counts. The backward of a matrix product costs twice its
forward: once for the input's gradient, and once for the weight's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from raypipe.graph.dims import Sizes, evaluate_all
from raypipe.graph.operations import ATTENTION, Operation, OperationGraph, TensorType

MOVES_NOTHING = (
    {"view", "_unsafe_view", "reshape", "expand", "transpose", "permute", "t"}
    | {"unsqueeze", "squeeze", "slice", "select", "split", "chunk", "unbind", "detach"}
    | {"alias", "flatten", "unflatten", "getitem", "sym_size", "numpy_T", "mT"}
)
"""Operations that usually return a view of their input."""


def forward_flops(graph: OperationGraph, number: int, sizes: Sizes) -> float:
    """Count the floating-point operations of one forward of an operation."""
    operation = graph.operations[number]
    product = matrix_flops(graph, operation, sizes)
    if product is not None:
        return product / 2 if operation.causal else product
    if operation.type is None or not operation.type.floating or short_name(operation.target) in MOVES_NOTHING:
        return 0.0
    return float(prod(evaluate_all(operation.type.shape, sizes)))


def matrix_flops(graph: OperationGraph, operation: Operation, sizes: Sizes) -> float | None:
    """Count the floating-point operations of a matrix product, attention or convolution; None for other operations.

    Those of attention are of all scores.
    """
    name = short_name(operation.target)
    shapes = [evaluate_all(t.shape, sizes) if t is not None else () for t in operand_types(graph, operation)]
    if name in ("scaled_dot_product_attention", "_scaled_dot_product_attention_math"):
        *batch, queries, width = shapes[0]
        return 2.0 * prod(batch) * queries * shapes[1][-2] * (width + shapes[2][-1])
    if operation.target == "raypipe.module.default":  # an opaque module counts as one product with each of its matrices
        matrices = [
            prod(s) for o, s in zip(operation.operands, shapes, strict=True) if isinstance(o, str) and len(s) > 1
        ]
        return 2.0 * sum(matrices) * prod(shapes[0][:-1])
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):  # each step multiplies by every matrix once
        return 2.0 * prod(shapes[0][:-1]) * sum(prod(s) for s in shapes[1:] if len(s) == 2)
    if operation.type is None:
        return None
    written = prod(evaluate_all(operation.type.shape, sizes))
    if name == "linear":
        return 2.0 * written * shapes[1][-1]
    if name in ("mm", "bmm", "matmul", "mv", "dot", "_grouped_mm", "grouped_mm_fallback"):
        return 2.0 * written * shapes[0][-1]
    if name in ("addmm", "baddbmm", "addbmm", "addmv"):
        return 2.0 * written * shapes[1][-1]
    if name == "einsum":
        return _einsum(operation.equation, shapes)
    if name in ("convolution", "conv1d", "conv2d", "conv3d", "_convolution"):
        return 2.0 * written * prod(shapes[1][1:])
    if name.startswith("conv_transpose"):
        return 2.0 * prod(shapes[0]) * prod(shapes[1][1:])
    return None


def _einsum(equation: str, shapes: list[tuple[int, ...]]) -> float:
    """Count a multiply-add per combination of all indices, which is exact for two operands, the usual case."""
    length: dict[str, int] = {}
    for term, shape in zip(equation.replace(" ", "").split("->")[0].split(","), shapes, strict=False):
        before, dots, after = term.partition("...")
        rest = len(shape) - len(before) - len(after)
        labels = [*before, *(f".{i}" for i in range(rest if dots else 0)), *after]
        for label, size in zip(labels, shape, strict=False):
            length[label] = max(length.get(label, 1), size)
    return 2.0 * prod(length.values())


def operand_types(graph: OperationGraph, operation: Operation) -> list[TensorType | None]:
    """Return the type of each operand."""
    return [graph.type_of(operand) for operand in operation.operands]


def short_name(target: str) -> str:
    """Return an operation's name without its library and overload.

    >>> short_name("aten.linear.default"), short_name("operator.getitem")
    ('linear', 'getitem')
    """
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


# The tensors that autograd saves for the backward of a captured operation.
#
# They follow from the operation's name. An operation without a rule saves the activations that it reads, as most
# derivative formulas do. Source: PyTorch's ``tools/autograd/derivatives.yaml``.
KEEPS_RESULT = {"softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax"}
KEEPS_RESULT |= {"tanh", "sigmoid", "exp", "sqrt", "rsqrt", "reciprocal", "relu", "relu_"}
KEEPS_NOTHING = (
    {"add", "add_", "sub", "sub_", "rsub", "neg", "cat", "stack", "clone", "contiguous"}
    | {"copy", "to", "_to_copy", "sum", "mean", "masked_fill", "where", "dropout"}
    | {"constant_pad_nd", "pad", "roll", "index_select", "repeat", "repeat_interleave", "embedding"}
    | {"copy_to_group", "reduce_from_group", "gather_from_group", "rows_of_tensor_rank"}
    | {"gather_sequence", "scatter_sequence"}
)
"""Operations that are linear in their operands. What dropout and embedding do save is counted separately."""
BILINEAR = {"mul", "mul_", "div", "div_", "matmul", "bmm", "mm", "baddbmm", "einsum", "linear", "addmm", "addbmm"}
"""Operations that save an operand if the other operand has a gradient."""
PASSES_ON = {"add", "add_", "sub", "sub_", "neg", "copy_to_group", "reduce_from_group", "masked_fill_"}
"""Operations that pass their gradient on without a kernel of their own."""


def root(graph: OperationGraph, number: int) -> int:
    """Return the operation that owns the memory a view refers to; the results of one operation are separate."""
    operation = graph.operations[number]
    while is_view(graph, number) and operation.inputs:
        before = graph.operations[operation.inputs[0]]
        if before.type is None and short_name(before.target) not in MOVES_NOTHING:
            break
        number, operation = operation.inputs[0], before
    return number


def is_view(graph: OperationGraph, number: int) -> bool:
    """Return whether an operation's result is a view of its input.

    A reshape that joins an expanded dimension with the one before it is not a view but a copy, as for the keys and
    values of grouped-query attention.
    """
    operation = graph.operations[number]
    if short_name(operation.target) not in MOVES_NOTHING:
        return False
    before = graph.operations[operation.inputs[0]] if operation.inputs else operation
    if short_name(operation.target) != "reshape" or short_name(before.target) != "expand" or not before.inputs:
        return True
    small, large = graph.operations[before.inputs[0]].type, before.type
    if small is None or large is None or len(small.shape) != len(large.shape):
        return False
    grown = [d for d, (a, b) in enumerate(zip(small.shape, large.shape, strict=True)) if a != b]
    return all(d == 0 or large.shape[d - 1] == 1 for d in grown)


def kept_operands(graph: OperationGraph, number: int) -> list[int]:
    """Return the operands (numbers of operations) that an operation saves for its backward, as in its call."""
    operation = graph.operations[number]
    name = short_name(operation.target)
    if not graph.requires_grad[number] or name in MOVES_NOTHING | KEEPS_NOTHING | KEEPS_RESULT:
        return []
    activations = [i for i in operation.inputs if _floating(graph, i)]
    if name not in BILINEAR:
        return activations
    return [
        i
        for i in activations
        if any(_wanted(graph, other) for other in operation.operands if other != i) or operation.inputs.count(i) > 1
    ]


def keeps_result(graph: OperationGraph, number: int) -> bool:
    """Return whether an operation saves its result for its backward."""
    return graph.requires_grad[number] and short_name(graph.operations[number].target) in KEEPS_RESULT


def passes_on(graph: OperationGraph, number: int) -> bool:
    """Return whether an operation's backward does almost nothing."""
    name = short_name(graph.operations[number].target)
    return not graph.requires_grad[number] or name in MOVES_NOTHING | PASSES_ON


def _floating(graph: OperationGraph, number: int) -> bool:
    kind = graph.operations[number].type
    return kind is not None and kind.floating and bool(kind.shape)


def _wanted(graph: OperationGraph, operand: int | str) -> bool:
    """Return whether an operand requires a gradient."""
    return graph.requires_grad[operand] if isinstance(operand, int) else graph.sources[operand].requires_grad


# Bytes that a sub-graph moves and keeps where a compiler fuses memory-bound operations, as TorchInductor does.
#
# Operations without a matrix product that follow one another join to one kernel, as far as no product, attention or
# collective lies between them: it reads what comes from elsewhere once and writes what is read elsewhere. In the
# backward it reads its inputs again, with the gradients of what it wrote, and writes those of its inputs. What it wrote
# for a product is kept only where the kernel's own backward needs nothing of its inputs; else it is computed again from
# these (He and Yu 2023, Transcending runtime-memory tradeoffs in checkpointing by being fusion aware: the cheaper side
# of the cut is kept). It is counted apart: torch keeps it all the same, because the backward would have to write it
# (``ban_recompute_materialized_backward`` of its min-cut).


class FusedWork(NamedTuple):
    """Bytes of a sub-graph for one sample."""

    forward: float
    backward: float
    kept: float
    """Of results, without statistics and masks."""
    operands: float
    """Of what is computed again for a product."""
    kernels: int
    """Of the forward, fused ones and others."""


@dataclass
class _Kernel:
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    needs_inputs: bool = False


@dataclass(frozen=True)
class FusionRules:
    """Facts about the operations that the caller knows."""

    graph: OperationGraph
    alone: Callable[[int], bool]
    """Operations that are kernels of their own: products, attention, look-ups, collectives."""
    root: Callable[[int], int]
    """The operation that owns the memory of a result."""
    keeps: Callable[[int], Sequence[int]]
    """The operations whose results its backward reads, its own among them."""
    size: Callable[[int], float]
    """Bytes of a result for one sample; 0 of what every stage makes anew."""
    share: Callable[[int, int], float]
    """Bytes of a result, which comes second, as an operation reads it, for each byte of it."""


def fused_work(rules: FusionRules, span: range) -> FusedWork:
    """Fuse the operations of a sub-graph."""
    graph, alone, root, size = rules.graph, rules.alone, rules.root, rules.size
    own = [i for i in span if root(i) == i and size(i)]
    depth: dict[int, int] = {}
    """Kernels of their own on the longest way to an operation: only operations as deep as one another are fused."""
    kernel_of: dict[int, _Kernel] = {}
    inputs = {i: {root(o) for o in graph.operations[i].inputs if size(root(o))} for i in own}
    for i in own:
        inside = [o for o in inputs[i] if o in depth]
        depth[i] = max((depth[o] + alone(o) for o in inside), default=0)
        if alone(i):
            continue
        same = [kernel_of[o] for o in inside if o in kernel_of and depth[o] == depth[i]]
        kernel = same[0] if same else _Kernel()
        for other in same[1:]:  # joined by this operation
            if other is not kernel:
                kernel.reads |= other.reads
                kernel.needs_inputs |= other.needs_inputs
                kernel_of.update({o: kernel for o, result in kernel_of.items() if result is other})
        kernel_of[i] = kernel
        kernel.reads |= {o for o in inputs[i] if kernel_of.get(o) is not kernel}
        kernel.needs_inputs |= bool(rules.keeps(i))
    kernels = list({id(kernel): kernel for kernel in kernel_of.values()}.values())
    users = _users(graph, own, root)
    forward = backward = 0.0
    for i, kernel in kernel_of.items():
        outside = [u for u in users[i] if kernel_of.get(u) is not kernel]
        if outside or not users[i]:
            kernel.writes.add(i)
            forward += size(i)
            backward += size(i) * max(1, sum(graph.requires_grad[u] for u in outside)) * graph.requires_grad[i]
    for kernel in kernels:
        kernel.reads = {o for o in kernel.reads if kernel_of.get(o) is not kernel}
        forward += sum(map(size, kernel.reads))
        if any(graph.requires_grad[i] for i in kernel.writes):
            backward += sum(size(o) * (kernel.needs_inputs + graph.requires_grad[o]) for o in kernel.reads)
    kept: dict[int, float] = {}
    again: dict[int, float] = {}
    for i in filter(alone, own):
        for o in rules.keeps(i):
            at = root(o)
            where = again if at in kernel_of and kernel_of[at].needs_inputs else kept
            where[at] = max(where.get(at, 0.0), rules.share(i, o) * size(at))
    for kernel in kernels:
        if kernel.needs_inputs:
            kept |= {o: size(o) for o in kernel.reads}
    again = {o: more for o, more in again.items() if o not in kept}
    return FusedWork(forward, backward, sum(kept.values()), sum(again.values()), len(kernels) + sum(map(alone, own)))


def _users(graph: OperationGraph, own: Sequence[int], root: Callable[[int], int]) -> dict[int, list[int]]:
    """Return the operations, views left out, that read each of these results or a view of it."""
    result: dict[int, list[int]] = {}
    for i in own:
        todo, seen = [i], list[int]()
        while todo:
            for user in graph.users[todo.pop()]:
                if root(user) == user:
                    seen.append(user)
                else:
                    todo.append(user)
        result[i] = seen
    return result


# Which weight gradients of a captured model can wait for W, and what share of their FLOPs cannot.
#
# The gradient of a matrix can wait wherever a product reads it: the matrix itself, or a *weight expression*: what
# operations make of parameters alone (a transposed matrix, a parametrization, the experts that a router chose by
# index). B then computes the product's gradient for its input only, and W the rest, back to the parameters.
#
# Source: zero-bubble pipeline parallelism (Qi et al. 2023), section 2.1: the two gradients of a product are
# independent.


PLACES: dict[str, tuple[int, ...]] = (
    {"linear": (1, 2), "addmm": (0, 2, 1), "baddbmm": (0, 2, 1), "mm": (1, 0), "bmm": (1, 0), "matmul": (1, 0)}
    | {"mv": (0,), "einsum": (1,), "_grouped_mm": (1, 3), "grouped_mm_fallback": (1,), "conv1d": (1, 2)}
    | {"conv2d": (1, 2), "conv3d": (1, 2), "conv_transpose1d": (1, 2), "conv_transpose2d": (1, 2)}
    | {"conv_transpose3d": (1, 2), "embedding": (0,), "embedding_bag": (0,), "_embedding_bag": (0,)}
    | {"index": (0,), "index_select": (0,), "lstm": (2,), "gru": (2,), "rnn_tanh": (2,), "rnn_relu": (2,)}
)
"""Per operation, the arguments that may be weights; for ``einsum`` and recurrent ones, a list of tensors."""
GATHERS = {"index", "index_select", "select", "slice", "gather"}
"""Operations whose result is a weight expression whatever chooses the rows."""
WAITING_PRODUCTS = set(PLACES) - {"embedding", "embedding_bag", "_embedding_bag", "index", "index_select"}


def weight_expressions(graph: OperationGraph) -> tuple[bool, ...]:
    """Return, per operation, whether its result is made of parameters alone, as far as gradients are concerned.

    >>> from raypipe.graph.operations import Operation, Source, TensorType
    >>> square = TensorType((4, 4), "float32")
    >>> sources = {"w": Source("parameter", square, True), "x": Source("input", square)}
    >>> t = Operation("t", "aten.t.default", ({"of": "w"},), type=square)
    >>> y = Operation("y", "aten.mm.default", ({"of": "x"}, {"op": 0}), type=square)
    >>> weight_expressions(OperationGraph((t, y), sources, {"y": 1}))
    (True, False)
    """
    result: list[bool] = []
    for number, operation in enumerate(graph.operations):
        name = short_name(operation.target)
        read = [result[o] if isinstance(o, int) else graph.sources[o].kind == "parameter" for o in operation.operands]
        fixed = [
            fine or (isinstance(o, str) and graph.sources[o].kind in ("buffer", "constant"))
            for o, fine in zip(operation.operands, read, strict=True)
        ]
        whole = bool(fixed) and all(fixed) and any(read)
        gathered = bool(read) and read[0] and name in GATHERS
        result.append((whole or gathered) and not operation.random and graph.requires_grad[number])
    return tuple(result)


def weight_flops(graph: OperationGraph, number: int, sizes: Sizes, expressions: Sequence[bool]) -> float:
    """Count the FLOPs of an operation's weight gradient: those of its forward, if it multiplies by a trained weight."""
    operation = graph.operations[number]
    flops = matrix_flops(graph, operation, sizes)
    if flops is None or expressions[number]:
        return 0.0
    factors = operation.operands[:3] if operation.target == ATTENTION else operation.operands  # not its mask
    trained = any(
        expressions[o]
        if isinstance(o, int)
        else graph.sources[o].requires_grad and len(graph.sources[o].type.shape) > 1
        for o in factors
    )
    return flops if trained else 0.0


def split_flops(graph: OperationGraph, span: range, sizes: Sizes) -> tuple[float, float]:
    """Return the FLOPs of these operations' weight gradients, and how many of them B computes even when it is split."""
    expressions = weight_expressions(graph)
    total = left = 0.0
    for number in span:
        flops = weight_flops(graph, number, sizes, expressions)
        total += flops
        left += flops if short_name(graph.operations[number].target) not in WAITING_PRODUCTS else 0.0
    return total, left
