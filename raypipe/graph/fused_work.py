"""Bytes that a sub-graph moves and keeps where a compiler fuses memory-bound operations, as TorchInductor does.

Operations without a matrix product that follow one another join to one kernel, as far as no product, attention or
collective lies between them: it reads what comes from elsewhere once and writes what is read elsewhere. In the backward
it reads its inputs again, with the gradients of what it wrote, and writes those of its inputs. What it wrote for a
product is kept only where the kernel's own backward needs nothing of its inputs; else it is computed again from these
(He and Yu 2023, Transcending runtime-memory tradeoffs in checkpointing by being fusion aware: the cheaper side of the
cut is kept).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raypipe.graph.operations import OperationGraph


class FusedWork(NamedTuple):
    """Bytes of a sub-graph for one sample."""

    forward: float
    backward: float
    kept: float
    """Of results, without statistics and masks."""
    kernels: int
    """Of the forward, fused ones and others."""


@dataclass
class _Kernel:
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    needs_inputs: bool = False


@dataclass(frozen=True)
class FusionRules:
    """Facts about the operations that the caller knows."""

    graph: OperationGraph
    alone: Callable[[int], bool]
    """Operations that are kernels of their own: products, attention, look-ups, collectives."""
    root: Callable[[int], int]
    """The operation that owns the memory of a result."""
    keeps: Callable[[int], Sequence[int]]
    """The operations whose results its backward reads, its own among them."""
    size: Callable[[int], float]
    """Bytes of a result for one sample; 0 of what every stage makes anew."""


def fused_work(rules: FusionRules, span: range) -> FusedWork:
    """Fuse the operations of a sub-graph."""
    graph, alone, root, size = rules.graph, rules.alone, rules.root, rules.size
    own = [i for i in span if root(i) == i and size(i)]
    depth: dict[int, int] = {}
    """Kernels of their own on the longest way to an operation: only operations as deep as one another are fused."""
    kernel_of: dict[int, _Kernel] = {}
    inputs = {i: {root(o) for o in graph.operations[i].inputs if size(root(o))} for i in own}
    for i in own:
        inside = [o for o in inputs[i] if o in depth]
        depth[i] = max((depth[o] + alone(o) for o in inside), default=0)
        if alone(i):
            continue
        same = [kernel_of[o] for o in inside if o in kernel_of and depth[o] == depth[i]]
        kernel = same[0] if same else _Kernel()
        for other in same[1:]:  # joined by this operation
            if other is not kernel:
                kernel.reads |= other.reads
                kernel.needs_inputs |= other.needs_inputs
                kernel_of.update({o: kernel for o, found in kernel_of.items() if found is other})
        kernel_of[i] = kernel
        kernel.reads |= {o for o in inputs[i] if kernel_of.get(o) is not kernel}
        kernel.needs_inputs |= bool(rules.keeps(i))
    kernels = list({id(kernel): kernel for kernel in kernel_of.values()}.values())
    users = _users(graph, own, root)
    forward = backward = 0.0
    for i, kernel in kernel_of.items():
        outside = [u for u in users[i] if kernel_of.get(u) is not kernel]
        if outside or not users[i]:
            kernel.writes.add(i)
            forward += size(i)
            backward += size(i) * max(1, sum(graph.requires_grad[u] for u in outside)) * graph.requires_grad[i]
    for kernel in kernels:
        kernel.reads = {o for o in kernel.reads if kernel_of.get(o) is not kernel}
        forward += sum(map(size, kernel.reads))
        if any(graph.requires_grad[i] for i in kernel.writes):
            backward += sum(size(o) * (kernel.needs_inputs + graph.requires_grad[o]) for o in kernel.reads)
    kept: set[int] = set()
    for i in own:
        if alone(i):
            needed = {root(o) for o in rules.keeps(i)}
            kept |= {o for o in needed if o not in kernel_of or not kernel_of[o].needs_inputs}
    for kernel in kernels:
        if kernel.needs_inputs:
            kept |= kernel.reads
    return FusedWork(forward, backward, sum(map(size, kept)), len(kernels) + sum(map(alone, own)))


def _users(graph: OperationGraph, own: Sequence[int], root: Callable[[int], int]) -> dict[int, list[int]]:
    """Return the operations, views left out, that read each of these results or a view of it."""
    found: dict[int, list[int]] = {}
    for i in own:
        todo, seen = [i], list[int]()
        while todo:
            for user in graph.users[todo.pop()]:
                if root(user) == user:
                    seen.append(user)
                else:
                    todo.append(user)
        found[i] = seen
    return found
