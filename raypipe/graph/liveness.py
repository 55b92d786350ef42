"""What a cut between two operations separates: the tensors that must be passed on, and those that need not be."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.graph.flops import matrix_flops
from raypipe.graph.operations import Operation, OperationGraph


def replicated(graph: OperationGraph) -> tuple[bool, ...]:
    """Per operation, whether a stage that needs its result computes it anew instead of receiving it.

    That is what follows from raw inputs, buffers and constants alone - position ids, attention masks, rotary tables -
    through operations that are cheap, draw nothing at random and write no buffer. Every stage is fed the raw inputs,
    so sending such a tensor (an attention mask has a value per pair of tokens) would only cost bandwidth.
    """
    known: tuple[bool, ...] | None = graph.__dict__.get("_replicated")
    if known is None:
        known = graph.__dict__["_replicated"] = _replicated(
            graph
        )  # asked for at every cut of a graph that never changes
    return known


def _replicated(graph: OperationGraph) -> tuple[bool, ...]:
    written = {name for operation in graph.operations for name in operation.mutates}
    smallest = {name: 1 << 20 for name in graph.example}  # a matrix product costs at any size
    found: list[bool] = []
    for operation in graph.operations:
        fixed = all(
            graph.sources[n].kind in ("input", "constant") or (graph.sources[n].kind == "buffer" and n not in written)
            for n in operation.sources
        )
        known = operation.target.startswith("aten.") or operation.target.split(".")[0] in ("operator", "torch", "math")
        cheap = (
            known
            and not operation.random
            and not operation.mutates
            and matrix_flops(graph, operation, smallest) is None
        )
        found.append(fixed and cheap and all(found[i] for i in operation.inputs))
    return tuple(found)


def last_uses(graph: OperationGraph) -> list[int]:
    """Per operation, the last one that reads its result; what the model returns is read after the end."""
    end = len(graph.operations)
    last = [max(users, default=-1) for users in graph.users]
    for number in graph.outputs.values():
        last[number] = end
    return last


def crossing(graph: OperationGraph, starts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The operations whose results cross each cut before the operations ``starts``: one sorted tuple per start.

    A result is passed along from cut to cut until its last use, so a receiver needs only its predecessor.
    Replicated operations and raw inputs do not cross.
    """
    anew, last = replicated(graph), last_uses(graph)
    return tuple(tuple(i for i in range(min(start, len(anew))) if last[i] >= start and not anew[i]) for start in starts)


def needed_anew(graph: OperationGraph, numbers: Sequence[int]) -> list[int]:
    """The replicated operations that these operations need, directly or not, in order."""
    anew = replicated(graph)
    return sorted(_reached(graph.operations, numbers, anew))


def runs_in(graph: OperationGraph, span: range) -> list[int]:
    """The operations that a stage of these operations runs: its own, and those it computes anew, in order."""
    anew = replicated(graph)
    leaving = list(graph.outputs.values()) if span.stop == len(graph.operations) else []
    own = {n for n in span if not anew[n]}
    return sorted(own | set(needed_anew(graph, [*own, *leaving])) | {n for n in leaving if anew[n]})


def inputs_read(graph: OperationGraph, span: range) -> tuple[str, ...]:
    """Raw inputs of the model that a stage of these operations reads."""
    read = {name for n in runs_in(graph, span) for name in graph.operations[n].sources}
    return tuple(name for name in graph.inputs if name in read)


def _reached(operations: Sequence[Operation], numbers: Sequence[int], follow: Sequence[bool]) -> set[int]:
    found: set[int] = set()
    todo = list(numbers)
    while todo:
        for used in operations[todo.pop()].inputs:
            if follow[used] and used not in found:
                found.add(used)
                todo.append(used)
    return found
