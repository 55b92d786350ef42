"""Divide a model's operations into the layers of a DAG: pieces that branches can be put together from.

Merak's sub-graphs (``subgraphs``) are cut where one tensor crosses, so parallel branches end up in one
sub-graph, or one behind the other. Here every branch keeps pieces of its own:

- A run of operations that only hand one tensor on is one piece, as in ``placement.from_model``.
- Branches that leave one piece and meet again are one piece with what joins them, if running them side by side would
  save at most ``GAIN`` of the model's forward (the query, key and value of one attention among many), and together
  they are at most ``WHOLE`` of it (so a skip over half the model joins nothing).
- A piece of less than ``NOTHING`` (a norm) joins the only one that reads it; neighbours in a row are one piece up to
  ``GAIN``.

None of this makes a cycle: what leaves a piece never comes back to it. All paths from a fork's branches go through
what joins them, so what else the branches read does not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from raypipe.errors import CaptureError
from raypipe.graph.dims import Sizes
from raypipe.graph.liveness import replicated
from raypipe.graph.operation_costs import forward_flops
from raypipe.graph.operations import OperationGraph

GAIN = 1 / 64
"""Share of the model's forward up to which side-by-side branches, and rows of pieces, are not kept apart."""
NOTHING = GAIN / 64
"""Share of the model's forward up to which a piece is not worth a place of its own."""
WHOLE = 1 / 16
"""Largest share of the model's forward that branches are joined to."""


def branch_order(graph: OperationGraph, one: Sizes) -> tuple[tuple[int, ...], ...]:
    """Return the operations of each piece, pieces in an order in which they can run.

    Operations that every stage repeats for itself (``liveness.replicated``) are in the first piece.

    Args:
        graph: the model.
        one: sizes of inputs that hold one sample.

    Raises:
        CaptureError: pieces would wait for one another.
    """
    repeated = replicated(graph)
    home = _runs(graph, repeated)
    members: dict[int, list[int]] = {}
    for n, h in home.items():
        members.setdefault(h, []).append(n)
    work = {h: float(sum(forward_flops(graph, n, one) for n in group)) for h, group in members.items()}
    reads = [(source, h) for n, h in home.items() for source in graph.operations[n].inputs if source in home]
    contracted = _Contracted(members, work, {(home[source], h) for source, h in reads if home[source] != h})
    while contracted.join_small_fork() or contracted.join_row():
        pass
    ordered = [tuple(sorted(contracted.members[h])) for h in contracted.order()]
    everywhere = tuple(n for n, again in enumerate(repeated) if again)
    return (tuple(sorted((*everywhere, *ordered[0]))), *ordered[1:])


def _runs(graph: OperationGraph, repeated: Sequence[bool]) -> dict[int, int]:
    """The first operation of the run that each operation belongs to.

    The items of an operation with several results stay with it, since only tensors cross from piece to piece. What only
    leads to the writing of a buffer (the count of a batch norm's batches) stays with what it reads, or else with the
    operations of its module.
    """
    home: dict[int, int] = {}
    leads = _lead_on(graph)
    of_module = {graph.operations[n].module: n for n in range(len(leads)) if leads[n] and not repeated[n]}
    waiting: list[int] = []
    for n, operation in enumerate(graph.operations):
        if repeated[n]:
            continue
        read = sorted({source for source in operation.inputs if not repeated[source]})
        items = [source for source in read if graph.operations[source].type is None]
        if not leads[n] and (not read or read[-1] in waiting):
            waiting.append(n)
        elif items or not leads[n]:
            home[n] = home[(items or read)[-1]]
        elif len(read) == 1 and len(graph.users[read[0]]) == 1:
            home[n] = home[read[0]]
        else:
            home[n] = n
    for n in waiting:
        home[n] = home[of_module.get(graph.operations[n].module, min(home))]
    return home


def _lead_on(graph: OperationGraph) -> list[bool]:
    """Per operation, whether something that the model returns depends on it."""
    result = [False] * len(graph.operations)
    for number in graph.outputs.values():
        result[number] = True
    for n in reversed(range(len(result))):
        if result[n]:
            for source in graph.operations[n].inputs:
                result[source] = True
    return result


class _Contracted:
    """A graph of pieces, each named by one of its operations."""

    def __init__(self, members: dict[int, list[int]], work: dict[int, float], edges: set[tuple[int, int]]) -> None:
        self.members, self.work = members, work
        self.small = GAIN * sum(work.values())
        self.graph = nx.DiGraph()
        self.graph.add_nodes_from(members)
        self.graph.add_edges_from(sorted(edges))

    def order(self) -> list[int]:
        """All pieces in an order in which they can run, near the model's own."""
        first = {h: min(group) for h, group in self.members.items()}
        try:
            return list(nx.lexicographical_topological_sort(self.graph, first.__getitem__))
        except nx.NetworkXUnfeasible:
            names = ", ".join(str(first[h]) for h, _ in nx.find_cycle(self.graph))
            why = f"the pieces that begin with operations {names} wait for one another"
            raise CaptureError("parallel.placement", why, "use placement: line, ring or v") from None

    def join(self, group: Sequence[int]) -> None:
        """Make some pieces one."""
        into, *others = group
        for other in others:
            self.members[into] += self.members.pop(other)
            self.work[into] += self.work.pop(other)
            nx.contracted_nodes(self.graph, into, other, self_loops=False, copy=False)

    def join_small_fork(self) -> bool:
        """Join the innermost branches that leave one piece and meet again, if running them side by side gains little;
        return whether there were any."""
        order = self.order()
        end = -1  # after every piece that nothing reads
        backwards = self.graph.reverse()
        backwards.add_edges_from((end, h) for h in self.graph if not self.graph.succ[h])
        joins = nx.immediate_dominators(backwards, end)
        for fork in reversed(order):
            join = joins[fork]
            if len(self.graph.succ[fork]) < 2 or join == end:
                continue
            between = nx.descendants(self.graph, fork) - nx.descendants(self.graph, join) - {join}
            together = sum(self.work[h] for h in between | {join})
            light = together <= WHOLE / GAIN * self.small
            if light and self._gain(between, order) <= self.small:
                self.join([h for h in order if h in between or h == join])
                return True
        return False

    def _gain(self, between: set[int], order: Sequence[int]) -> float:
        longest: dict[int, float] = {}
        for h in order:
            if h in between:
                longest[h] = self.work[h] + max((longest.get(p, 0.0) for p in self.graph.pred[h]), default=0.0)
        return sum(self.work[h] for h in between) - max(longest.values(), default=0.0)

    def join_row(self) -> bool:
        """Join a light piece with the only one that reads it; return whether there was any."""
        nothing = NOTHING / GAIN * self.small
        for a in self.graph:
            if len(self.graph.succ[a]) != 1:
                continue
            (b,) = self.graph.succ[a]
            light = self.work[b] <= nothing or self.work[a] + self.work[b] <= self.small
            if self.work[a] <= nothing or (len(self.graph.pred[b]) == 1 and light):
                self.join((a, b))
                return True
        return False
