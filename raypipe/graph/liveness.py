"""Tensors between operations and between stages: what crosses a cut, what stages repeat instead, what edges carry.

A model's layers form a DAG: a *result* is a tensor that one layer makes and later ones read. Stages are sets of layers,
and the stage graph says which stages talk. A result that a stage needs comes from one of the stages it receives from:
the one that makes it, or one that has received it itself and passes it on. So in a chain everything travels from stage
to stage, and in a graph of branches a result goes straight to its readers, once per device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raypipe.errors import ScheduleError
from raypipe.graph.operation_costs import matrix_flops
from raypipe.graph.operations import OperationGraph
from raypipe.schedule.ir import StageGraph


class Result(NamedTuple):
    """A tensor that one layer makes and others read."""

    made_by: int
    """The layer that computes it."""
    read_by: tuple[int, ...]
    """The other layers that need it, in order; the last layer needs what the model returns."""


@dataclass(frozen=True, slots=True)
class StageEnds:
    """The numbers of the model's results that a stage exchanges with other stages."""

    arrives: Mapping[int, tuple[int, ...]]
    """Per stage that it receives from, in order, the results that come from there."""
    leaves: Mapping[int, tuple[int, ...]]
    """Per stage that it sends to, in order, the results that go there."""

    @property
    def arriving(self) -> tuple[int, ...]:
        """All results that it receives, in the order of ``arrives``."""
        return tuple(r for results in self.arrives.values() for r in results)

    @property
    def leaving(self) -> tuple[int, ...]:
        """All results that it sends, each once, in order; several stages may get the same."""
        return tuple(sorted({r for results in self.leaves.values() for r in results}))


def live_after(results: Sequence[Result], layer: int) -> tuple[int, ...]:
    """Return the results made up to a layer that a later one reads: those that cross a cut of the chain there."""
    return tuple(r for r, one in enumerate(results) if one.made_by <= layer < max(one.read_by, default=-1))


def between_parts(
    results: Sequence[Result], parts: Sequence[Sequence[int]], arriving: Sequence[int], leaving: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return what each part of a stage but the last hands to the next one, where its parts run one after the other.

    Args:
        results: the model's.
        parts: layers of each part.
        arriving, leaving: results that the stage receives and sends.
    """
    result: list[tuple[int, ...]] = []
    for k in range(1, len(parts)):
        before = {i for part in parts[:k] for i in part}
        after = {i for part in parts[k:] for i in part}
        made = {r for r, one in enumerate(results) if one.made_by in before}
        had = {r for r in {*arriving, *leaving, *made} if results[r].made_by not in after}
        result.append(tuple(sorted(r for r in had if r in leaving or after.intersection(results[r].read_by))))
    return result


def stage_graph(results: Sequence[Result], cut: Sequence[Sequence[int]], devices: Sequence[int]) -> StageGraph:
    """Return the edges that a cut needs if every result goes straight to the devices that read it, once to each.

    Where several stages of a device read a result of another device, the first one passes it on to the others, which
    costs no message.

    Args:
        results: the model's.
        cut: layers of each stage.
        devices: device of each stage.
    """
    edges: set[tuple[int, int]] = set()
    for home, readers in _readers(results, cut):
        first: dict[int, int] = {}
        for stage in readers:
            holder = home if devices[stage] == devices[home] else first.setdefault(devices[stage], stage)
            edges.add((home if holder == stage else holder, stage))
    return StageGraph(len(cut), tuple(sorted(edges)))


def stage_ends(
    results: Sequence[Result], cut: Sequence[Sequence[int]], graph: StageGraph, devices: Sequence[int] | None = None
) -> tuple[StageEnds, ...]:
    """Return the tensors on every edge of a stage graph, by stage.

    Args:
        results: the model's.
        cut: layers of each stage.
        graph: which stages may talk.
        devices: device of each stage, so that a result comes from its own device where it can; None where it makes no
            difference, as in a chain.

    Raises:
        ScheduleError: a stage needs a result that no path of the graph brings it; it names both stages.
    """
    where = devices or range(graph.stages)
    inputs = graph.inputs()
    reached = _reached(inputs)
    needs: list[set[int]] = [set() for _ in cut]
    made_in: dict[int, int] = {}
    for r, (home, readers) in enumerate(_readers(results, cut)):
        made_in[r] = home
        for stage in readers:
            needs[stage].add(r)
    reads = [frozenset(need) for need in needs]
    on_edge: dict[tuple[int, int], list[int]] = {edge: [] for edge in graph.edges}
    for stage in reversed(range(graph.stages)):
        for r in sorted(needs[stage]):
            home = made_in[r]
            sources = [s for s in inputs[stage] if s == home or home in reached[s]]
            if not sources:
                why = f"stage {stage} needs a tensor of stage {home}, and no edges lead there"
                raise ScheduleError("edges", why, f"add the edge {home}>{stage}")

            def rank(s: int, r: int = r, home: int = home, stage: int = stage) -> tuple[bool, bool, int]:
                return (where[s] == where[stage] and (s == home or r in reads[s]), s == home, s)

            source = max(sources, key=rank)
            on_edge[source, stage].append(r)
            if source != home:
                needs[source].add(r)
    return tuple(
        StageEnds(
            {s: tuple(sorted(on_edge[s, stage])) for s in inputs[stage]},
            {n: tuple(sorted(on_edge[stage, n])) for n in outputs},
        )
        for stage, outputs in enumerate(graph.outputs())
    )


def check_order(results: Sequence[Result], cut: Sequence[Sequence[int]]) -> None:
    """Check that every stage reads only from earlier ones.

    Raises:
        ScheduleError: one reads from a later stage.
    """
    for home, readers in _readers(results, cut):
        if readers and readers[0] < home:
            raise ScheduleError(
                "cut",
                f"stage {readers[0]} reads a tensor that stage {home} makes",
                "number stages in the order they run",
            )


def _readers(results: Sequence[Result], cut: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
    """Per result, the stage that makes it, and the other stages that read it, in order."""
    stage_of = {layer: s for s, layers in enumerate(cut) for layer in layers}
    return [
        (stage_of[result.made_by], sorted({stage_of[i] for i in result.read_by} - {stage_of[result.made_by]}))
        for result in results
    ]


def _reached(inputs: Sequence[Sequence[int]]) -> list[set[int]]:
    """Per stage, all stages that paths lead from."""
    result: list[set[int]] = []
    for own in inputs:
        result.append(set(own).union(*(result[s] for s in own)))
    return result


# From layers on devices to stages: as few as let every device begin and send as early as the layers would.
#
# Connected layers of one device are one stage if they wait for the same tensors of other devices, directly or not, so
# that they can begin together; and if the same tensors for other devices wait for them, so that what they make is
# needed equally soon. Along an edge from stage to stage, the first set can only grow and the second only shrink, so no
# two stages wait for each other.
Stages = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""(layers of each stage, device of each stage)."""


def stages_of(results: Sequence[Result], devices: Sequence[int]) -> Stages:
    """Group layers into stages, numbered in an order in which they can run.

    Args:
        results: the model's, whose layers are numbered in an order in which they can run.
        devices: device of each layer.
    """
    count = len(devices)
    edges = {(result.made_by, reader) for result in results for reader in result.read_by}
    before: list[list[int]] = [[] for _ in range(count)]
    after: list[list[int]] = [[] for _ in range(count)]
    for a, b in sorted(edges):
        before[b].append(a)
        after[a].append(b)
    # Sets of layers, as bits: those of other devices that a layer waits for; it and those after it that feed others.
    waits, feeds = [0] * count, [0] * count
    for i in range(count):
        for p in before[i]:
            waits[i] |= waits[p] | (devices[p] != devices[i]) << p
    for i in reversed(range(count)):
        for n in after[i]:
            feeds[i] |= feeds[n] | (devices[n] != devices[i]) << i
    key = [(devices[i], waits[i], feeds[i]) for i in range(count)]
    parent = list(range(count))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for a, b in edges:
        if key[a] == key[b]:
            parent[root(b)] = root(a)
    groups: dict[int, list[int]] = {}
    for i in range(count):
        groups.setdefault(root(i), []).append(i)
    ordered = sorted(groups.values(), key=lambda own: (waits[own[0]].bit_count() - feeds[own[0]].bit_count(), own[0]))
    return tuple(map(tuple, ordered)), tuple(devices[own[0]] for own in ordered)


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
    result: list[bool] = []
    for operation in graph.operations:
        fixed = all(
            graph.sources[n].kind in ("input", "constant") or (graph.sources[n].kind == "buffer" and n not in written)
            for n in operation.sources
        )
        known = operation.target.startswith("aten.") or operation.target.split(".")[0] in ("operator", "torch", "math")
        cheap = (
            known and not operation.random and not operation.mutates and matrix_flops(graph, operation, sizes) is None
        )
        result.append(fixed and cheap and all(result[i] for i in operation.inputs))
    return tuple(result)


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
    result: set[int] = set()
    todo = list(numbers)
    while todo:
        new = {used for used in graph.operations[todo.pop()].inputs if repeated[used]} - result
        result |= new
        todo += new
    return sorted(result)


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
