"""What autograd keeps of a captured operation until its backward, and what its backward moves.

By the operation's name; one that no rule knows keeps the activations that it reads, as most formulas of derivatives do.
Source: PyTorch's ``tools/autograd/derivatives.yaml``.
"""

from __future__ import annotations

from raypipe.graph.flops import MOVES_NOTHING, short_name
from raypipe.graph.operations import OperationGraph

KEEPS_RESULT = {
    "softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax", "tanh", "sigmoid", "exp", "sqrt", "rsqrt",
    "reciprocal", "relu", "relu_",
}  # fmt: skip
KEEPS_NOTHING = {
    "add", "add_", "sub", "sub_", "rsub", "neg", "cat", "stack", "clone", "contiguous", "copy", "to", "_to_copy", "sum",
    "mean", "masked_fill", "where", "dropout", "constant_pad_nd", "pad", "roll", "index_select", "repeat",
    "repeat_interleave", "embedding", "copy_to_group", "reduce_from_group", "gather_from_group", "rows_of_tensor_rank",
}  # fmt: skip
"""Linear in what they read. What dropout and a look-up do keep is counted apart."""
BILINEAR = {"mul", "mul_", "div", "div_", "matmul", "bmm", "mm", "baddbmm", "einsum", "linear", "addmm", "addbmm"}
"""Keep an operand where the other one has a gradient."""
PASSES_ON = {"add", "add_", "sub", "sub_", "neg", "copy_to_group", "reduce_from_group", "masked_fill_"}
"""Hand their gradient on as it is, without a kernel of their own."""


def root(graph: OperationGraph, number: int) -> int:
    """The operation whose result a view looks at; of several results that an operation gives, each its own."""
    operation = graph.operations[number]
    while is_view(graph, number) and operation.inputs:
        before = graph.operations[operation.inputs[0]]
        if before.type is None and short_name(before.target) not in MOVES_NOTHING:
            break
        number, operation = operation.inputs[0], before
    return number


def is_view(graph: OperationGraph, number: int) -> bool:
    """Whether an operation gives what it reads another shape, or takes parts of it, without moving anything.

    To join a dimension that was expanded with the one before it takes a copy: keys and values of grouped queries.
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
    """The results among its operands that an operation keeps for its backward, as they stand in the call."""
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
    """Whether its backward is a formula of its result."""
    return graph.requires_grad[number] and short_name(graph.operations[number].target) in KEEPS_RESULT


def passes_on(graph: OperationGraph, number: int) -> bool:
    """Whether its backward does nothing, or next to nothing."""
    name = short_name(graph.operations[number].target)
    return not graph.requires_grad[number] or name in MOVES_NOTHING | PASSES_ON


def _floating(graph: OperationGraph, number: int) -> bool:
    kind = graph.operations[number].type
    return kind is not None and kind.floating and bool(kind.shape)


def _wanted(graph: OperationGraph, operand: int | str) -> bool:
    """Whether a gradient is asked for with respect to an operand."""
    return graph.requires_grad[operand] if isinstance(operand, int) else graph.sources[operand].requires_grad
