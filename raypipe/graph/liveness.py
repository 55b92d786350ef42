"""Find the tensors that cross a cut between two operations, and the operations that stages repeat instead."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from raypipe.graph.operation_costs import matrix_flops
from raypipe.graph.operations import OperationGraph
from raypipe.graph.stages.links import Result


def replicated(graph: OperationGraph) -> tuple[bool, ...]:
    """Return, per operation, whether every stage that needs its result computes it itself instead of receiving it.

    These are cheap operations without random numbers or writes to buffers that depend only on raw inputs, buffers and
    constants, such as position ids, attention masks and rotary tables. Every stage reads the raw inputs, so sending
    such a tensor (an attention mask has a value per pair of tokens) would only cost bandwidth.
    """
    known: tuple[bool, ...] | None = graph.__dict__.get("_replicated")
    if known is None:  # cached, because it is needed at every cut of a graph that never changes
        known = graph.__dict__["_replicated"] = _replicated(graph)
    return known


def _replicated(graph: OperationGraph) -> tuple[bool, ...]:
    written = {name for operation in graph.operations for name in operation.mutates}
    sizes = {name: 1 << 20 for name in graph.example}  # any sizes do: only whether it is a matrix product matters
    found: list[bool] = []
    for operation in graph.operations:
        fixed = all(
            graph.sources[n].kind in ("input", "constant") or (graph.sources[n].kind == "buffer" and n not in written)
            for n in operation.sources
        )
        known = operation.target.startswith("aten.") or operation.target.split(".")[0] in ("operator", "torch", "math")
        cheap = (
            known and not operation.random and not operation.mutates and matrix_flops(graph, operation, sizes) is None
        )
        found.append(fixed and cheap and all(found[i] for i in operation.inputs))
    return tuple(found)


def last_uses(graph: OperationGraph) -> list[int]:
    """Return, per operation, the last operation that reads its result; for outputs, the number of operations."""
    end = len(graph.operations)
    last = [max(users, default=-1) for users in graph.users]
    for number in graph.outputs.values():
        last[number] = end
    return last


def crossing(graph: OperationGraph, starts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the operations whose results cross the cut before each of ``starts``: one sorted tuple per start.

    A result is passed on from cut to cut until its last use, so a stage receives only from the previous one.
    Replicated operations and raw inputs do not cross.
    """
    repeated, last = replicated(graph), last_uses(graph)
    count = len(repeated)
    return tuple(tuple(i for i in range(min(start, count)) if last[i] >= start and not repeated[i]) for start in starts)


def needed_replicated(graph: OperationGraph, numbers: Sequence[int]) -> list[int]:
    """Return the replicated operations that these operations need, directly or indirectly, in order."""
    repeated = replicated(graph)
    found: set[int] = set()
    todo = list(numbers)
    while todo:
        new = {used for used in graph.operations[todo.pop()].inputs if repeated[used]} - found
        found |= new
        todo += new
    return sorted(found)


def between_spans(graph: OperationGraph, starts: Sequence[int]) -> tuple[tuple[int, ...], tuple[Result, ...]]:
    """Return the operations whose results one span of operations makes and others read, and which those are.

    The last span reads what the model returns. Replicated operations and raw inputs are no results.
    """
    repeated, returned = replicated(graph), set(graph.outputs.values())
    home = [bisect_right(starts, n) - 1 for n in range(len(graph.operations))]
    numbers, results = [], []
    for number, users in enumerate(graph.users):
        readers = {home[user] for user in users} | ({len(starts) - 1} if number in returned else set())
        readers.discard(home[number])
        if readers and not repeated[number]:
            numbers.append(number)
            results.append(Result(home[number], tuple(sorted(readers))))
    return tuple(numbers), tuple(results)


def runs_in(graph: OperationGraph, span: Sequence[int]) -> list[int]:
    """Return the operations that a stage of ``span`` runs, in order: its own, and the replicated ones it needs.

    The stage with the model's last operation also gives what the model returns.
    """
    repeated = replicated(graph)
    leaving = list(graph.outputs.values()) if len(graph.operations) - 1 in span else []
    own = {n for n in span if not repeated[n]}
    return sorted(own | set(needed_replicated(graph, [*own, *leaving])) | {n for n in leaving if repeated[n]})


def inputs_read(graph: OperationGraph, span: Sequence[int]) -> tuple[str, ...]:
    """Return the raw inputs of the model that a stage of ``span`` reads."""
    read = {name for n in runs_in(graph, span) for name in graph.operations[n].sources}
    return tuple(name for name in graph.inputs if name in read)
