"""Merak's graph sharding: a model's operations as a sequence of sub-graphs that hand on as little as possible.

An operation stays in the sub-graph of its farthest dependency, so that normally one tensor crosses each cut: the
addition that ends a residual branch reads the branch's input, which pulls the whole branch into one sub-graph.
*Common* results - used by several blocks of the model, such as a position bias or an encoder's output - are exempt
and passed along from cut to cut. A sub-graph is closed once it holds its share of the parameters.

Source: Lai et al. 2023 (Merak), section 4.2, Algorithms 1 and 2. Where it differs:

- Sub-graphs are runs of the order in which operations run, so where they start says everything, and pulling back
  means forgetting starts: linear time. The paper renumbers nodes one by one, up to and including the farthest
  dependency; where that is the output of an earlier sub-graph, renumbering it as well would make two tensors cross.
- A common result is one that two repeated blocks of the model use, read off the module paths, or its own block and
  what is outside of all, or what is outside behind another block (a router's loss takes something of every block). The
  paper's rule (more users than there are layers) is what is left for models without such blocks.
- What follows from raw inputs alone (attention masks) is computed anew where it is needed and ties nothing together.
- The default share is an eighth of an average block, so that a lone norm before the head closes nothing, and an
  attention does, whatever the size of the vocabulary.
- A sub-graph is also closed where the first block begins.
- Neighbours outside the blocks, one of them without a matrix product, become one (token and position embedding).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, pairwise

from raypipe.errors import RequestError
from raypipe.graph.flops import matrix_flops
from raypipe.graph.labels import label
from raypipe.graph.liveness import crossing, replicated
from raypipe.graph.operations import OperationGraph

SHARES_PER_BLOCK = 8
"""By default a sub-graph may close once it holds more than this part of an average block's parameters."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """A model's operations, cut into sub-graphs that run one after another."""

    starts: tuple[int, ...]
    """The operation that each sub-graph begins with; the first is 0."""
    end: int
    """Number of operations."""
    labels: tuple[str, ...]
    """What each sub-graph is: ``embedding``, ``attention``, ``mlp``, ``head``, or a module's path."""
    blocks: tuple[str, ...]
    """The repeated block of the model that each sub-graph is in, or ""."""
    cuts: tuple[tuple[int, ...], ...]
    """Before each sub-graph but the first: the operations whose results cross, in order."""

    @property
    def count(self) -> int:
        """Number of sub-graphs."""
        return len(self.starts)

    def operations(self, subgraphs: range) -> range:
        """The operations of consecutive sub-graphs."""
        return range(self.starts[subgraphs[0]], (*self.starts, self.end)[subgraphs[-1] + 1])


def shard(graph: OperationGraph, parts: int | None = None) -> Sharding:
    """Cut a model into sub-graphs; with ``parts`` (the paper's k), the share is the whole model's k-th part.

    Raises:
        RequestError: the model has no operations that hold anything, so there is nothing to cut.
    """
    if not graph.parameters:
        raise RequestError("model", "has no parameters", "give a model that can be trained")
    starts = _merge_light(graph, _starts(graph, parts))
    edges = [*starts, len(graph.operations)]
    labels = tuple(label(graph, range(a, b)) for a, b in pairwise(edges))
    blocks = tuple(_block(graph, range(a, b)) for a, b in pairwise(edges))
    return Sharding(tuple(starts), len(graph.operations), labels, blocks, crossing(graph, starts[1:]))


def common_operations(graph: OperationGraph) -> frozenset[int]:
    """The operations whose results are passed along instead of tying their users together."""
    found = set()
    # Per operation, the last block that has begun by then.
    begun = list(accumulate(graph.blocks, _latest))
    for number, users in enumerate(graph.users):
        if graph.layers:
            own, using = graph.blocks[number], {graph.blocks[user] for user in users}
            far = any(not graph.blocks[user] and begun[user] != begun[number] for user in users)
            if len(using - {""}) > 1 or far or (own and "" in using and len(using) > 1):
                found.add(number)
        elif len(users) > len(graph.parameters):
            found.add(number)
    return frozenset(found)


def _latest(before: str, block: str) -> str:
    return block or before


def _starts(graph: OperationGraph, parts: int | None) -> list[int]:
    """Algorithm 2, with Algorithm 1 inlined."""
    anew, common, share = replicated(graph), common_operations(graph), _share(graph, parts)
    returned = set(graph.outputs.values())
    starts, outputs = [0], [-1]  # per sub-graph: its first operation, and the result it hands on once it is closed
    held: list[set[str]] = [set()]  # per sub-graph, the parameters it reads
    visited, closed = -1, False
    for number, operation in enumerate(graph.operations):
        if anew[number]:
            continue
        aside = not graph.users[number] and number not in returned  # it writes a buffer, and nothing follows from it
        if not closed and visited >= 0 and graph.blocks[number] and not graph.blocks[visited] and held[-1]:
            closed, outputs[-1] = True, visited  # the first block begins
        if closed and not aside:
            starts.append(number)
            outputs.append(-1)
            held.append(set())
            closed = False
        farthest = len(starts) - 1
        for used in operation.inputs:
            if anew[used] or used in common or used == visited:
                continue
            home = _home(starts, used)
            farthest = min(farthest, home + 1 if outputs[home] == used else home)
        if farthest < len(starts) - 1:
            held[farthest].update(*held[farthest + 1 :])
            del starts[farthest + 1 :], outputs[farthest + 1 :], held[farthest + 1 :]
            closed, outputs[-1] = False, -1
        held[-1].update(graph.parameters_of([operation]))
        if aside:
            continue
        closed = operation.type is not None and sum(graph.parameters[name] for name in held[-1]) > share
        outputs[-1] = number if closed else -1
        visited = number
    if len(starts) > 1 and not held[-1]:  # what is left after the head, such as the loss
        starts.pop()
    return starts


def _home(starts: list[int], number: int) -> int:
    """The sub-graph that an operation is in now; dependencies are near, so this looks from the end."""
    home = len(starts) - 1
    while starts[home] > number:
        home -= 1
    return home


def _share(graph: OperationGraph, parts: int | None) -> float:
    total = sum(graph.parameters.values())
    if parts is not None:
        return total / parts
    if not graph.block_parameters:
        return total / (SHARES_PER_BLOCK * len(graph.parameters))
    return sum(graph.block_parameters.values()) / (SHARES_PER_BLOCK * graph.layers)


def _block(graph: OperationGraph, span: range) -> str:
    """The block that most of a sub-graph's operations with parameters are in."""
    holders = [graph.blocks[i] for i in span if graph.parameters_of([graph.operations[i]])]
    return Counter(holders).most_common(1)[0][0] if holders else ""


def _merge_light(graph: OperationGraph, starts: list[int]) -> list[int]:
    """Join neighbours outside the blocks of which one holds no matrix product."""
    spans = [range(a, b) for a, b in pairwise([*starts, len(graph.operations)])]
    outside = [not _block(graph, span) for span in spans]
    light = [not any(matrix_flops(graph, graph.operations[i], graph.example) for i in span) for span in spans]
    return [
        start
        for n, start in enumerate(starts)
        if n == 0 or not (outside[n - 1] and outside[n] and (light[n - 1] or light[n]))
    ]
