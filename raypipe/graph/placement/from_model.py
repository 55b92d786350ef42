"""The placement graph of a captured model: one training step's operations with their costs on one kind of device.

Every operation becomes its forward (F) and its backward: joint (BW), or the gradients of its input (B) and of its
parameters (W) apart. All are on one node, since they share parameters and kept activations. A run of operations that
only hand one tensor on becomes one operation: cutting it could only add a transfer between operations that cannot run
at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, get_args

from raypipe.cost.kernels import Kernels
from raypipe.errors import CaptureError
from raypipe.graph.dims import Sizes
from raypipe.graph.operations import OperationGraph
from raypipe.graph.placement.problem import PlacementGraph, PlacementOperation
from raypipe.graph.subgraph_work import captured_work
from raypipe.graph.subgraphs import Subgraphs
from raypipe.schedule.kinds import BW

Backward = Literal["joint", "split", "none"]
BACKWARDS: tuple[Backward, ...] = get_args(Backward)


def placement_graph(
    graph: OperationGraph,
    one: Sizes,
    samples: int,
    kernels: Kernels,
    bytes_per_parameter: float = 16.0,
    backward: Backward = "joint",
    merge: bool = True,
) -> PlacementGraph:
    """Operations, tensors, times and memory of one step.

    Args:
        graph: the captured model.
        one: sizes of inputs that hold one sample.
        samples: batch of the step.
        kernels: those of the device.
        bytes_per_parameter: what a parameter occupies: itself, its gradient, optimizer state.
        backward: ``joint``: the two gradients of an operation are one; ``split``: they are two, and that of the
            parameters may run later; ``none``: a forward only.
        merge: make runs of operations one.

    Raises:
        CaptureError: the model has no operations.
    """
    kept = [i for i, op in enumerate(graph.operations) if op.type is not None and op.type.floating]
    if not kept:
        raise CaptureError("model", "has no operations on floating-point tensors", "give a model that computes")
    home = _runs(graph, kept) if merge else {i: i for i in kept}
    members: dict[int, list[int]] = defaultdict(list)
    for i in kept:
        members[home[i]].append(i)
    count = len(graph.operations)
    single = Subgraphs(
        tuple(range(count)), count, tuple(op.name for op in graph.operations), ("",) * count, ((),) * count
    )
    works = [each.work for each in captured_work(graph, single, one)]
    names = _names(graph, members)
    operations: list[PlacementOperation] = []
    trained = {h: any(graph.requires_grad[i] for i in group) for h, group in members.items()}
    holds = {h: sum(works[i].parameters for i in group) for h, group in members.items()}
    for h, group in members.items():
        memory = bytes_per_parameter * holds[h]
        if backward != "none" and trained[h]:
            memory += samples * sum(works[i].kept_bytes for i in group)
        kinds = [("F", [works[i].forward for i in group])]
        if backward == "joint" and trained[h]:
            kinds.append((BW, [e for i in group for e in (works[i].input_grad, works[i].weight_grad)]))
        elif backward == "split" and trained[h]:
            kinds.append(("B", [works[i].input_grad for i in group]))
            if holds[h]:
                kinds.append(("W", [works[i].weight_grad for i in group]))
        for kind, efforts in kinds:
            operations.append(
                PlacementOperation(
                    name=f"{names[h]} {kind}",
                    seconds=sum(kernels.seconds(effort, samples, backward=kind != "F") for effort in efforts),
                    memory_bytes=memory if kind == "F" else 0.0,
                    colocate=names[h] if len(kinds) > 1 else None,
                )
            )
    edges: list[tuple[str, str, float]] = []
    back = BW if backward == "joint" else "B"
    for source, target, i in _tensors(graph, kept, home):
        result = graph.operations[i].type
        assert result is not None  # only floating-point results are kept
        size = float(samples * result.bytes(one))
        edges.append((f"{names[source]} F", f"{names[target]} F", size))
        if backward != "none" and trained[source] and graph.requires_grad[i]:
            edges.append((f"{names[target]} {back}", f"{names[source]} {back}", size))
    for h in members:
        if backward != "none" and trained[h]:
            edges.append((f"{names[h]} F", f"{names[h]} {back}", 0.0))
            if backward == "split" and holds[h]:
                edges.append((f"{names[h]} B", f"{names[h]} W", 0.0))
    found = PlacementGraph(operations=tuple(operations), edges=tuple(edges))
    found.check()
    return found


def _runs(graph: OperationGraph, kept: Sequence[int]) -> dict[int, int]:
    """The first operation of the run that each operation belongs to."""
    inside = set(kept)
    readers: dict[int, set[int]] = defaultdict(set)
    for i in kept:
        for source in graph.operations[i].inputs:
            if source in inside:
                readers[source].add(i)
    home: dict[int, int] = {}
    for i in kept:
        sources = {source for source in graph.operations[i].inputs if source in inside}
        only = next(iter(sources)) if len(sources) == 1 else None
        home[i] = home[only] if only is not None and len(readers[only]) == 1 else i
    return home


def _tensors(graph: OperationGraph, kept: Sequence[int], home: dict[int, int]) -> list[tuple[int, int, int]]:
    """(producing run, reading run, operation whose result it is), each once."""
    inside = set(kept)
    found = {
        (home[source], home[i], source): None
        for i in kept
        for source in graph.operations[i].inputs
        if source in inside and home[source] != home[i]
    }
    return list(found)


def _names(graph: OperationGraph, members: dict[int, list[int]]) -> dict[int, str]:
    """A name for each run: the module path that its operations share, numbered where several share one."""
    names: dict[int, str] = {}
    seen: dict[str, int] = defaultdict(int)
    for h, group in members.items():
        paths = [graph.operations[i].module.split(".") for i in group]
        shared = 0
        while all(len(path) > shared and path[shared] == paths[0][shared] for path in paths):
            shared += 1
        first = graph.operations[h]
        name = ".".join(paths[0][:shared]) or first.name
        if len(group) == 1:
            name = f"{'.'.join(paths[0])}.{first.name}" if first.module else first.name
        seen[name] += 1
        names[h] = name if seen[name] == 1 else f"{name}#{seen[name]}"
    return names
