"""Merak's graph sharding: divide a model's operations into sub-graphs with as few tensors between them as possible.

An operation joins the sub-graph of its farthest dependency, so that normally one tensor crosses each cut: the addition
that ends a residual branch reads the branch's input, which pulls the whole branch into one sub-graph. *Common* results,
which several blocks of the model use (such as a position bias or an encoder's output), do not pull; they are passed on
from cut to cut. A sub-graph is closed once it holds its share of the parameters.

Source: Lai et al. 2023 (Merak), section 4.2, Algorithms 1 and 2. The differences are:

- A sub-graph is a range of operations in the order they run, so the sub-graphs are given by their starts, and pulling
  back means removing starts, in linear time. The paper renumbers nodes one by one, up to and including the farthest
  dependency. Where that is the output of an earlier sub-graph, two tensors would then cross.
- By the module paths, a result is common if two repeated blocks use it, if its own block and operations outside of all
  blocks use it, or if an operation outside uses it after another block has begun (a router's loss reads a result of
  every block). The paper's rule (more users than layers) applies only to models without repeated blocks.
- Operations that depend on raw inputs alone (attention masks) are replicated where they are needed, and do not pull.
- The default share is an eighth of an average block, so that a single norm before the head does not close a sub-graph,
  but an attention does, whatever the size of the vocabulary.
- A sub-graph is also closed where the first block begins, and behind a block that it holds whole, so that light blocks
  among heavy ones (dense ones before many with experts) keep sub-graphs of their own.
- Neighbours outside the blocks, of which one has no matrix product, are merged (token and position embedding).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from raypipe.errors import RequestError
from raypipe.graph.liveness import crossing, replicated
from raypipe.graph.operation_costs import matrix_flops, short_name
from raypipe.graph.operations import OperationGraph

SHARES_PER_BLOCK = 8
"""By default a sub-graph is closed once it holds more than 1 / this of an average block's parameters."""


@dataclass(frozen=True, slots=True)
class Subgraphs:
    """A model's operations, divided into sub-graphs that run one after another."""

    starts: tuple[int, ...]
    """The first operation of each sub-graph; that of the first sub-graph is 0."""
    end: int
    """Number of operations."""
    labels: tuple[str, ...]
    """Label of each sub-graph: ``embedding``, ``attention``, ``mlp``, ``head``, or a module's path."""
    blocks: tuple[str, ...]
    """The repeated block of the model that each sub-graph is in, or ""."""
    cuts: tuple[tuple[int, ...], ...]
    """Before each sub-graph but the first, the operations whose results cross the cut, in order."""

    @property
    def count(self) -> int:
        """Number of sub-graphs."""
        return len(self.starts)

    def operations(self, subgraphs: range) -> range:
        """Return the operations of consecutive sub-graphs."""
        return range(self.starts[subgraphs[0]], (*self.starts, self.end)[subgraphs[-1] + 1])


def shard(graph: OperationGraph, parts: int | None = None, more: int = 0) -> Subgraphs:
    """Divide a model into sub-graphs.

    Args:
        graph: the model.
        parts: the paper's k: a share is 1 / k of the whole model.
        more: take the share of a model whose last block but one comes so many times more.

    Raises:
        RequestError: the model has no parameters.
    """
    if not graph.parameters:
        raise RequestError("model", "has no parameters", "give a model that can be trained")
    starts = _merge_light(graph, _starts(graph, _share(graph, parts, more)))
    edges = [*starts, len(graph.operations)]
    labels = tuple(label(graph, range(a, b)) for a, b in pairwise(edges))
    blocks = tuple(_block(graph, range(a, b)) for a, b in pairwise(edges))
    return Subgraphs(tuple(starts), len(graph.operations), labels, blocks, crossing(graph, starts[1:]))


def common_operations(graph: OperationGraph) -> frozenset[int]:
    """Return the operations whose results are passed on from cut to cut, and do not pull their users together."""
    result = set()
    # Per operation, the last block that has begun before or at it.
    begun: list[str] = []
    for block in graph.blocks:
        begun.append(block or (begun[-1] if begun else ""))
    for number, users in enumerate(graph.users):
        if graph.layers:
            own, using = graph.blocks[number], {graph.blocks[user] for user in users}
            far = any(not graph.blocks[user] and begun[user] != begun[number] for user in users)
            if len(using - {""}) > 1 or far or (own and "" in using and len(using) > 1):
                result.add(number)
        elif len(users) > len(graph.parameters):
            result.add(number)
    return frozenset(result)


def _starts(graph: OperationGraph, share: float) -> list[int]:
    """Run Algorithm 2, with Algorithm 1 inlined; return the sub-graphs' first operations."""
    repeated, common = replicated(graph), common_operations(graph)
    returned = set(graph.outputs.values())
    starts, outputs = [0], [-1]  # per sub-graph: its first operation, and the result it passes on once it is closed
    parameters: list[set[str]] = [set()]  # per sub-graph, the parameters it reads
    visited, closed = -1, False
    for number, operation in enumerate(graph.operations):
        if repeated[number]:
            continue
        aside = not graph.users[number] and number not in returned  # it only writes a buffer
        if not closed and visited >= 0 and graph.blocks[number] not in ("", graph.blocks[visited]) and parameters[-1]:
            begun = starts[-1] == 0 or graph.blocks[starts[-1] - 1] != graph.blocks[visited]
            if begun or not graph.blocks[visited]:  # the first block begins, or one behind a block that is whole here
                closed, outputs[-1] = True, visited
        if closed and not aside:
            starts.append(number)
            outputs.append(-1)
            parameters.append(set())
            closed = False
        farthest = len(starts) - 1
        for used in operation.inputs:
            if repeated[used] or used in common or used == visited:
                continue
            home = _home(starts, used)
            farthest = min(farthest, home + 1 if outputs[home] == used else home)
        if farthest < len(starts) - 1:
            parameters[farthest].update(*parameters[farthest + 1 :])
            del starts[farthest + 1 :], outputs[farthest + 1 :], parameters[farthest + 1 :]
            closed, outputs[-1] = False, -1
        parameters[-1].update(graph.parameters_of([operation]))
        if aside:
            continue
        closed = operation.type is not None and sum(graph.parameters[name] for name in parameters[-1]) > share
        outputs[-1] = number if closed else -1
        visited = number
    if len(starts) > 1 and not parameters[-1]:  # operations after the head, such as the loss
        starts.pop()
    return starts


def _home(starts: list[int], number: int) -> int:
    """Return the sub-graph that an operation is in now; it searches from the end, because dependencies are near."""
    home = len(starts) - 1
    while starts[home] > number:
        home -= 1
    return home


def _share(graph: OperationGraph, parts: int | None, more: int) -> float:
    total, blocks = sum(graph.parameters.values()), list(graph.block_parameters.values())
    if parts is not None:
        return total / parts
    if not blocks:
        return total / (SHARES_PER_BLOCK * len(graph.parameters))
    return (sum(blocks) + more * blocks[-2:][0]) / (SHARES_PER_BLOCK * (len(blocks) + more))


def _block(graph: OperationGraph, span: range) -> str:
    """Return the block that contains most of a sub-graph's operations with parameters."""
    holders = [graph.blocks[i] for i in span if graph.parameters_of([graph.operations[i]])]
    return Counter(holders).most_common(1)[0][0] if holders else ""


def _merge_light(graph: OperationGraph, starts: list[int]) -> list[int]:
    """Merge neighbouring sub-graphs outside the blocks of which one has no matrix product."""
    spans = [range(a, b) for a, b in pairwise([*starts, len(graph.operations)])]
    outside = [not _block(graph, span) for span in spans]
    light = [not any(matrix_flops(graph, graph.operations[i], graph.example) for i in span) for span in spans]
    return [
        start
        for n, start in enumerate(starts)
        if n == 0 or not (outside[n - 1] and outside[n] and (light[n - 1] or light[n]))
    ]


ATTENTION = ("scaled_dot_product_attention", "_scaled_dot_product_attention_math", "softmax", "_softmax")
CONVOLUTION = ("conv1d", "conv2d", "conv3d", "convolution")


def label(graph: OperationGraph, span: range) -> str:
    """Return a sub-graph's label.

    It is ``embedding``, ``stem``, ``attention``, ``mlp``, ``convolution``, ``block``, ``head``, or its module's path. A
    sub-graph is inside a block of the model if most of its operations with parameters are.
    """
    holders = [i for i in span if graph.parameters_of([graph.operations[i]])]
    names = {short_name(graph.operations[i].target) for i in span}
    products = [i for i in span if matrix_flops(graph, graph.operations[i], graph.example)]
    if not products:
        return "embedding" if "embedding" in names else _path(graph, holders or list(span))
    inside = Counter(bool(graph.blocks[i]) for i in holders)
    if graph.layers and inside[False] >= inside[True]:
        return _outside(graph, span, holders)
    attends = any(name in ATTENTION for name in names)
    if not graph.layers:
        return _path(graph, holders)
    if attends:
        return "block" if _has_mlp_too(graph, holders) else "attention"
    return "convolution" if names & set(CONVOLUTION) else "mlp"


def _outside(graph: OperationGraph, span: range, holders: list[int]) -> str:
    inside = [i for i, block in enumerate(graph.blocks) if block]
    if span.start <= inside[0]:
        return "embedding" if any("embed" in graph.operations[i].module.lower() for i in holders) else "stem"
    return "head" if span.stop > inside[-1] else _path(graph, holders)


def _has_mlp_too(graph: OperationGraph, holders: list[int]) -> bool:
    """Return whether a sub-graph with attention has parameters of an MLP too, judging by its modules' names."""
    parents = {".".join(graph.operations[i].module.split(".")[: len(graph.blocks[i].split(".")) + 1]) for i in holders}
    return any("mlp" in parent.lower() or "feed_forward" in parent.lower() for parent in parents)


def _path(graph: OperationGraph, numbers: list[int]) -> str:
    """Return the longest common path of these operations' modules, or the first one's path."""
    paths = [graph.operations[i].module.split(".") for i in numbers if graph.operations[i].module]
    if not paths:
        return "model"
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared or paths[0])


def piece_sharding(graph: OperationGraph, sizes: Sequence[int]) -> Subgraphs:
    """Describe pieces of these numbers of operations, one after the other, as sub-graphs."""
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)
    spans = [range(a, b) for a, b in pairwise(edges)]
    return Subgraphs(
        tuple(edges[:-1]),
        edges[-1],
        tuple(label(graph, span) for span in spans),
        ("",) * len(spans),
        crossing(graph, edges[1:-1]),
    )
