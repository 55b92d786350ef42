"""The share of one micro-batch in flight in a captured stage: its fixed inputs, its graphs, and what they put out.

Between its forward and its last backward, a micro-batch's values lie where its own graphs read and write them. So every
micro-batch in flight needs a slot of its own, and a slot serves the next one when nobody has a use for its values.
Forward, backward and weight gradients of a slot follow one another, so they share its pool; slots come in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from raypipe.models.keyed_random import holding_counters
from raypipe.runtime.backward.split_backward import Closure
from raypipe.runtime.compiled.program import StageProgram, Values
from raypipe.runtime.graphs.device_graphs import DeviceGraphs, Graph, Made

# Gradients that lie in the same memory in every step, so that a graph can add to them.


class FixedGradients:
    """The gradients of one stage replica's parameters.

    Those that are summed over devices lie in flat tensors already (``update.buckets``), which only have to last.

    Args:
        elsewhere: parameters whose gradients others hold, in memory that lasts.
    """

    def __init__(self, elsewhere: Collection[Tensor] = ()) -> None:
        self._elsewhere = frozenset(elsewhere)
        self._own: dict[Tensor, Tensor] = {}

    def open(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Let gradients accumulate in their memory from now until they are dropped; return them, in order.

        What has been computed elsewhere in this step is copied there; a first gradient of a step is added to zeros.
        """
        fresh = []
        for p in parameters:
            if p in self._elsewhere:
                continue
            own = self._own.get(p)
            if own is None:
                own = self._own[p] = torch.zeros_like(p, memory_format=torch.contiguous_format)
            if p.grad is own:
                continue
            if p.grad is None:
                fresh.append(own)
            else:
                own.copy_(p.grad)
            p.grad = own
        if fresh:
            torch._foreach_zero_(fresh)
        found = [p.grad for p in parameters]
        assert all(gradient is not None for gradient in found), "whoever sums gradients has opened them"
        return [gradient for gradient in found if gradient is not None]


@dataclass
class CapturedBackward:
    """A captured backward."""

    graph: Graph
    back: list[Tensor | None]
    """Per arrived tensor that gets one, its gradient."""
    waiting: list[Closure]
    """The weight gradients that it leaves to W. They can be computed once: when W is captured."""
    weights: Graph | None = None
    """That of W."""


class Slot:
    """The slot of one micro-batch.

    Args:
        program: the compiled stage.
        graphs: captures.
        gradients: where weight gradients accumulate.
        given: inputs of a forward.
        copied: numbers of the inputs of which the slot has copies. It reads the others (parameters, buffers, casts of
            parameters) where they are.
    """

    def __init__(
        self,
        program: StageProgram,
        graphs: DeviceGraphs,
        gradients: FixedGradients,
        given: Sequence[Tensor],
        copied: range,
    ) -> None:
        self._program, self._graphs, self._gradients, self._copied = program, graphs, gradients, copied
        self._given = [torch.empty_like(x) if i in copied else x for i, x in enumerate(given)]
        self._pool = graphs.new_pool()
        self._read: list[Tensor] = []
        """What the graphs read beside their inputs."""
        self._made: Sequence[Tensor] = ()
        self._forward: Graph | None = None
        self._tangents: list[Tensor] = []
        self._backwards: dict[bool, CapturedBackward] = {}
        self._trained = [p for p in program.own if p.requires_grad]

    def forward(self, given: Sequence[Tensor], keeps: bool) -> list[Tensor]:
        """Run the forward on these inputs.

        Args:
            given: the inputs, as those that the slot was made for.
            keeps: whether it keeps what a backward needs.

        Returns:
            Copies of the outputs and of the moments of batch norms.

        Raises:
            CaptureError: it cannot be captured.
        """
        torch._foreach_copy_([self._given[i] for i in self._copied], [given[i] for i in self._copied])
        if self._forward is None:
            pieces = self._program.pieces
            piece = pieces.forward if keeps or pieces.forward_only is None else pieces.forward_only

            def work() -> Sequence[Tensor]:
                return piece({"given": self._given})

            self._graphs.warm_up(work)
            self._forward, self._made = self._capture(work)
        self._forward.replay()
        return [x.clone() for x in self._made[: self._returned]]

    @property
    def _returned(self) -> int:
        """How many results of the forward others get; the rest is kept for the backward."""
        return len(self._program.differentiable) + len(self._program.statistics)

    def take(self, tangents: Sequence[Tensor]) -> None:
        """Take the gradients of the outputs, for the backward that comes next."""
        if not self._tangents:
            self._tangents = [torch.empty_like(x) for x in tangents]
        torch._foreach_copy_(self._tangents, list(tangents))

    def backward(self, whole: bool) -> list[Tensor | None]:
        """Run the backward that follows the forward, with ``whole`` also for the weights.

        Returns:
            Copies of the gradients of the arrived tensors that get one.

        Raises:
            CaptureError: it cannot be captured.
        """
        found = self._backwards.get(whole)
        if found is None:
            found = self._backwards[whole] = self._capture_backward(whole)
        elif whole:
            self._gradients.open(self._trained)
        found.graph.replay()
        return [None if x is None else x.clone() for x in found.back]

    def _capture_backward(self, whole: bool) -> CapturedBackward:
        def warm_up() -> None:
            for closure in self.eager_backward()[1]:
                with _scratch_gradients(closure.parameters):
                    closure.compute()

        def work() -> tuple[list[Tensor | None], list[Closure]]:
            back, waiting = self.eager_backward()
            if whole:
                _compute(waiting)
            return back, waiting

        self._graphs.warm_up(warm_up)
        if whole:
            self._gradients.open(self._trained)
        graph, (back, waiting) = self._capture(work)
        return CapturedBackward(graph, back, [] if whole else waiting)

    def weights(self) -> None:
        """Add the weight gradients that the last backward has left to the parameters'.

        Raises:
            CaptureError: it cannot be captured.
        """
        found = self._backwards[False]
        self._gradients.open(self._trained)
        if found.weights is None:
            found.weights, _ = self._capture(lambda: _compute(found.waiting))
        found.weights.replay()

    def _capture(self, work: Callable[[], Made]) -> tuple[Graph, Made]:
        with holding_counters(self._read):
            return self._graphs.capture(work, self._pool)

    def eager_backward(self) -> tuple[list[Tensor | None], list[Closure]]:
        """Run the backward uncaptured, on the slot's values; return its gradients, and what computes the weights'."""
        program, waiting = self._program, list[Closure]()
        values: Values = {"given": self._given, "kept": self._made[self._returned :], "tangent": self._tangents}
        with program.queue.collect(waiting):
            return program.run_backward(values, program.own), waiting


def _compute(closures: Sequence[Closure]) -> None:
    for closure in closures:
        closure.compute()


@contextmanager
def _scratch_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let gradients of these parameters inside the block be lost."""
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    try:
        yield
    finally:
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient
