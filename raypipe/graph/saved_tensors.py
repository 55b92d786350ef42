"""The tensors that autograd saves for the backward of a captured operation.

They follow from the operation's name. An operation without a rule saves the activations that it reads, as most
derivative formulas do. Source: PyTorch's ``tools/autograd/derivatives.yaml``.
"""

from __future__ import annotations

from raypipe.graph.dims import Sizes
from raypipe.graph.flops import MOVES_NOTHING, short_name
from raypipe.graph.operations import OperationGraph
from raypipe.graph.subgraphs import Sharding

KEEPS_RESULT = {
    "softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax", "tanh", "sigmoid", "exp", "sqrt", "rsqrt",
    "reciprocal", "relu", "relu_",
}  # fmt: skip
KEEPS_NOTHING = {
    "add", "add_", "sub", "sub_", "rsub", "neg", "cat", "stack", "clone", "contiguous", "copy", "to", "_to_copy", "sum",
    "mean", "masked_fill", "where", "dropout", "constant_pad_nd", "pad", "roll", "index_select", "repeat",
    "repeat_interleave", "embedding", "copy_to_group", "reduce_from_group", "gather_from_group", "rows_of_tensor_rank",
}  # fmt: skip
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
    return [i for i in activations if any(_wanted(graph, other) for other in operation.operands if other != i)
            or operation.inputs.count(i) > 1]  # fmt: skip


def keeps_result(graph: OperationGraph, number: int) -> bool:
    """Return whether an operation saves its result for its backward."""
    return graph.requires_grad[number] and short_name(graph.operations[number].target) in KEEPS_RESULT


def passes_on(graph: OperationGraph, number: int) -> bool:
    """Return whether an operation's backward does almost nothing."""
    name = short_name(graph.operations[number].target)
    return not graph.requires_grad[number] or name in MOVES_NOTHING | PASSES_ON


def unread_bytes(graph: OperationGraph, sharding: Sharding, one: Sizes) -> tuple[float, ...]:
    """Return, per sub-graph, the bytes that it receives, uses last, and that no operation saves for its backward.

    A sum that a ReLU reads first thing is an example: the ReLU saves its own result. A stage that begins with the
    sub-graph holds what it received all the same.

    Args:
        graph: the model.
        sharding: its sub-graphs.
        one: sizes for inputs of one sample.
    """
    numbers = range(len(graph.operations))
    saved = {root(graph, kept) for n in numbers for kept in kept_operands(graph, n)}
    saved |= {root(graph, n) for n in numbers if keeps_result(graph, n)}
    found = [0.0]
    for i, arriving in enumerate(sharding.cuts):
        passed_on = sharding.cuts[i + 1] if i + 1 < len(sharding.cuts) else ()
        held = saved | {root(graph, n) for n in passed_on}
        unread = {root(graph, n): kind for n in arriving if (kind := graph.operations[n].type) is not None}
        found.append(float(sum(t.bytes(one) for at, t in unread.items() if t.floating and at not in held)))
    return tuple(found)


def _floating(graph: OperationGraph, number: int) -> bool:
    kind = graph.operations[number].type
    return kind is not None and kind.floating and bool(kind.shape)


def _wanted(graph: OperationGraph, operand: int | str) -> bool:
    """Return whether an operand requires a gradient."""
    return graph.requires_grad[operand] if isinstance(operand, int) else graph.sources[operand].requires_grad
