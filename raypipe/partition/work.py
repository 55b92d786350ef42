"""Sub-graphs of a captured model as work: operations and bytes per sample, for the planner's cost model.

Counted operation by operation at the sizes of one sample. What a backward keeps is taken to be the floating-point
results that gradients flow through, views left out; kernels that keep less (a fused GELU) or more (dropout's mask) make
this an estimate, which ``raypipe profile`` replaces by a measurement.
"""

from __future__ import annotations

from collections.abc import Iterable

from raypipe.cost.work import Effort, LayerWork
from raypipe.partition.dims import Sizes
from raypipe.partition.flops import MOVES_NOTHING, matrix_flops, moved_bytes, operand_types, parameter_bytes, short_name
from raypipe.partition.operations import OperationGraph
from raypipe.partition.shard import Sharding

ATTENTION = "scaled_dot_product_attention"
FUSED_BACKWARD = 2.5
"""Attention's backward in forwards: four products where the forward has two, and the scores once more (Dao et al.
2022, FlashAttention, appendix B.2)."""
LIGHT = 0.3
"""Launches of a sub-graph without products, in those of a block's forward."""


def captured_work(graph: OperationGraph, sharding: Sharding, one: Sizes) -> tuple[LayerWork, ...]:
    """The work of every sub-graph; ``one`` are the sizes of inputs that hold one sample."""
    blocks = max(1, sum(1 for block in sharding.blocks if block) // max(1, len(set(sharding.blocks) - {""})))
    return tuple(_work(graph, sharding, i, one, 1 / blocks) for i in range(sharding.count))


def _work(graph: OperationGraph, sharding: Sharding, number: int, one: Sizes, share: float) -> LayerWork:
    span = sharding.operations(range(number, number + 1))
    names = graph.parameters_of([graph.operations[i] for i in span])
    products = [i for i in span if matrix_flops(graph, graph.operations[i], one)]
    others = [i for i in span if i not in set(products)]
    weighted = {i for i in products if graph.parameters_of([graph.operations[i]])}
    forward = {i: matrix_flops(graph, graph.operations[i], one) or 0.0 for i in products}
    operands = {i: _activations(graph, i, one) for i in products}
    held = float(parameter_bytes(graph, names))
    traffic = sum(moved_bytes(graph, i, one) for i in others if not _looks_up(graph, i))
    tables = sum(
        float(parameter_bytes(graph, graph.parameters_of([graph.operations[i]]))) for i in others if _looks_up(graph, i)
    )
    back = sum(forward[i] * _backward(graph, i, i in weighted) for i in products)
    overhead = share if products else LIGHT
    return LayerWork(
        name=f"{number} {sharding.labels[number]}", parameters=sum(graph.parameters[name] for name in names),
        forward=Effort(flops=sum(forward.values()), operands=sum(operands.values()), weights=held - tables,
                       traffic=traffic, overhead=overhead),
        input_grad=Effort(flops=back, operands=sum(operands.values()), weights=held - tables, traffic=1.5 * traffic,
                          overhead=overhead),
        # The gradient of a look-up is a whole table of mostly zeros, added to the sum.
        weight_grad=Effort(flops=sum(forward[i] for i in weighted), operands=sum(operands[i] for i in weighted),
                           weights=3 * (held - tables) + 4 * tables, overhead=overhead),
        kept_bytes=_kept(graph, span, one),
        output_bytes=sum(_bytes(graph, i, one) for i in _behind(sharding, number)),
        output_floats=sum(_bytes(graph, i, one) for i in _behind(sharding, number) if _floating(graph, i)),
    )  # fmt: skip


def _behind(sharding: Sharding, number: int) -> tuple[int, ...]:
    return sharding.cuts[number] if number < sharding.count - 1 else ()


def _looks_up(graph: OperationGraph, number: int) -> bool:
    return short_name(graph.operations[number].target) == "embedding"


def _backward(graph: OperationGraph, number: int, weighted: bool) -> float:
    """Products of the input's gradient, in those of the forward: one per operand that is an activation."""
    if short_name(graph.operations[number].target) == ATTENTION:
        return FUSED_BACKWARD
    wanted = [i for i in graph.operations[number].inputs if graph.requires_grad[i]]
    return float(min(len(wanted), 1 if weighted else 2))


def _activations(graph: OperationGraph, number: int, one: Sizes) -> float:
    """Bytes that a product reads and writes, parameters left out."""
    operation = graph.operations[number]
    read = [t for t, o in zip(operand_types(graph, operation), operation.operands, strict=True) if isinstance(o, int)]
    return float(sum(t.bytes(one) for t in [*read, operation.type] if t is not None))


def _kept(graph: OperationGraph, span: Iterable[int], one: Sizes) -> float:
    return float(
        sum(
            _bytes(graph, i, one)
            for i in span
            if graph.requires_grad[i] and short_name(graph.operations[i].target) not in MOVES_NOTHING
        )
    )


def _floating(graph: OperationGraph, number: int) -> bool:
    kind = graph.operations[number].type
    return kind is not None and kind.floating


def _bytes(graph: OperationGraph, number: int, one: Sizes) -> float:
    kind = graph.operations[number].type
    return 0.0 if kind is None else float(kind.bytes(one))
