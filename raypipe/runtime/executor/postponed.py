"""Reverse first-k: the weight gradients of a stage's first layers wait until its last backward has ended.

They are then computed from the first layer on, so that the sum that the next forward needs first starts first. Which
ones wait is decided when a micro-batch's forward builds its graph: a parameter that does not wait gets its gradient
from autograd, in the backward, as ever. In a schedule with split backwards, all weight gradients wait for W anyway;
there only the order within the last W changes.

Source: Oh et al. 2022 (OOO backprop), section 5.1, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from raypipe.runtime.backward.deferred import Closure
from raypipe.runtime.stage.stage import StageModule
from raypipe.schedule.ir import Task
from raypipe.schedule.lowering.programs import Program

Key = tuple[int, int]
"""(stage, replica)."""
NOTHING: frozenset[Tensor] = frozenset()


class PostponedGradients:
    """Which weight gradients of a device's stage replicas wait; without ``first_k``, none beyond those of W tasks."""

    def __init__(self, modules: Mapping[Key, StageModule]) -> None:
        self._modules = modules
        self._active = False
        self._layer: dict[Key, dict[Tensor, int]] = {}
        self._first: dict[Key, frozenset[Tensor]] = {}
        self._last: dict[Key, int] = {}
        self._split: set[tuple[int, int]] = set()

    def begin_step(self, program: Program, completes: Collection[Task], first_k: Mapping[Key, int]) -> None:
        """Begin a step.

        Args:
            program: the device's.
            completes: the tasks that complete a stage replica's gradients and that its sum follows at once.
            first_k: how many of its layers with parameters wait, per stage replica that sums its gradients; empty if
                the job does not ask for it.
        """
        self._active = bool(first_k)
        if not self._active:
            return
        self._split = {(a.task.stage, mb) for a in program.actions if a.task.kind == "W" for mb in a.task.mbs}
        self._last = {(t.stage, t.replica): t.mbs[-1] for t in completes}
        for key, k in first_k.items():
            layers = self._modules[key].trained_by_block
            self._layer[key] = {p: n for n, layer in enumerate(layers[:k]) for p in layer}
            self._first[key] = frozenset(self._layer[key])

    def of(self, key: Key, mb: int) -> frozenset[Tensor] | None:
        """Return the parameters whose gradients for a micro-batch wait; None for all that can (a W task's)."""
        if not self._active or (key[0], mb) in self._split:
            return None
        return self._first.get(key, NOTHING) if self._last.get(key) == mb else NOTHING

    @contextmanager
    def forward(self, key: Key, mb: int) -> Iterator[None]:
        """Surround the part of a forward that builds a micro-batch's graph."""
        queue = self._modules[key].queue
        before, queue.only = queue.only, self.of(key, mb)
        try:
            yield
        finally:
            queue.only = before

    def sort(self, key: Key, closures: list[Closure]) -> None:
        """Put the gradients of the first layers behind all others, from the first layer on."""
        layer = self._layer.get(key) if self._active else None
        if layer:
            closures.sort(key=lambda closure: 1 + min((layer.get(p, -1) for p in closure.parameters), default=-1))
