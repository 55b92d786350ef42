"""Compiled stages whose tasks are graphs: F, B, W, the joint backward and R are one replay each.

Inputs are copied into a slot's memory before a replay, and what leaves the stage is copied out of it after one: the
slot's memory belongs to the next micro-batch before the message is sent, or the next stage of this device has read it.
Weight gradients accumulate inside the graphs. Slots are captured when as many micro-batches are first in flight.

A task that cannot be captured runs uncaptured from then on, with a note. Where that is W, B does too, which hands W its
values.

Between its forward and its last backward, a micro-batch's values lie where its own graphs read and write them. So every
micro-batch in flight needs a slot of its own, and a slot serves the next one when nobody has a use for its values.
Forward, backward and weight gradients of a slot follow one another, so they share its pool; slots come in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raypipe.compat.torch_private import _foreach_copy_, _foreach_zero_
from raypipe.models import Inputs
from raypipe.models.keyed_random import RandomKeys, holding_counters
from raypipe.runtime.backward.deferred import Closure
from raypipe.runtime.backward.segments import Segment
from raypipe.runtime.compiled.program import CompiledStage, StageProgram, Values, span_of
from raypipe.runtime.executor.computation import CompiledForward, Forward
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.graphs.device_graphs import CudaGraphs, DeviceGraphs, Graph, GraphError, Made
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.stage.alternate import Alternation
from raypipe.runtime.stage.stage import OwnGraph, StageModule
from raypipe.runtime.transport.channel import Payload
from raypipe.schedule.kinds import BW
from raypipe.schedule.sharding import StageKey


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
            _foreach_zero_(fresh)
        result = [p.grad for p in parameters]
        assert all(gradient is not None for gradient in result), "whoever sums gradients has opened them"
        return [gradient for gradient in result if gradient is not None]


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
        _foreach_copy_([self._given[i] for i in self._copied], [given[i] for i in self._copied])
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
        _foreach_copy_(self._tangents, list(tangents))

    def backward(self, whole: bool) -> list[Tensor | None]:
        """Run the backward that follows the forward, with ``whole`` also for the weights.

        Returns:
            Copies of the gradients of the arrived tensors that get one.

        Raises:
            CaptureError: it cannot be captured.
        """
        result = self._backwards.get(whole)
        if result is None:
            result = self._backwards[whole] = self._capture_backward(whole)
        elif whole:
            self._gradients.open(self._trained)
        result.graph.replay()
        return [None if x is None else x.clone() for x in result.back]

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
        result = self._backwards[False]
        self._gradients.open(self._trained)
        if result.weights is None:
            result.weights, _ = self._capture(lambda: _compute(result.waiting))
        result.weights.replay()

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


Note = Callable[[str, str], None]
"""Told of a task that is not captured: which, and why."""


class CastCopies:
    """Copies of parameters in another dtype, which are refreshed in place when the parameter has changed."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] = {}

    @torch.no_grad()
    def copy_in(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``WeightQueue.copy_in``."""
        at = id(parameter), dtype
        _, version, copy = self._copies.get(at, (parameter, -1, None))
        if copy is None:
            copy = torch.empty_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
        if version != parameter._version:
            copy.copy_(parameter)
            self._copies[at] = parameter, parameter._version, copy
        return copy


class Lease:
    """The use of a slot; it ends when nobody holds it, and so also when a step is broken off."""

    def __init__(self, slot: Slot, free: list[Slot]) -> None:
        self.slot, self._free = slot, free

    def hold(self) -> None:
        """Do nothing; whoever may call this holds the lease."""

    def __del__(self) -> None:
        self._free.append(self.slot)


class CapturedProgram:
    """A stage program that runs as graphs.

    Args:
        program: the compiled stage, or a segment of it, on micro-batches of one shape.
        graphs: captures.
        gradients: of the stage replica.
        note: see ``Note``.
    """

    def __init__(self, program: StageProgram, graphs: DeviceGraphs, gradients: FixedGradients, note: Note) -> None:
        self.program = program
        self._graphs, self._gradients, self._note = graphs, gradients, note
        self._free: dict[bool, list[Slot]] = {True: [], False: []}
        """Slots that nobody uses, of forwards that keep what a backward needs, and of others."""
        self._where: list[int] = []
        self._uncaptured: set[str] = set()
        self._trained = tuple(p for p in program.own if p.requires_grad)
        program.copy_in = CastCopies().copy_in

    def __call__(
        self, keys: Callable[[], RandomKeys], arrived: Payload, inputs: Inputs, weights: dict[str, Tensor] | None
    ) -> tuple[Payload, OwnGraph | None]:
        """Run the forward of a whole stage; see ``StageProgram``."""
        result = self._run(keys, arrived, inputs, weights)
        if result is None:
            return self.program(keys, arrived, inputs, weights)
        lease, outputs = result
        return outputs, None if lease is None else CapturedRun(self, lease, outputs)

    def in_graph(
        self, keys: Callable[[], RandomKeys], arrived: Payload, inputs: Inputs, weights: dict[str, Tensor] | None
    ) -> tuple[Payload, OwnGraph | None]:
        """Run the forward of a segment; see ``StageProgram``."""
        result = self._run(keys, arrived, inputs, weights)
        if result is None:
            return self.program.in_graph(keys, arrived, inputs, weights)
        lease, outputs = result
        if lease is None:
            return outputs, None
        anchor = None if self.program.anchor is None else self.program.own[self.program.anchor]
        anchored: Payload = _RunGraph.apply(self, lease, outputs, anchor, *arrived)  # type: ignore[no-untyped-call]
        return anchored, None

    def _run(
        self, keys: Callable[[], RandomKeys], arrived: Payload, inputs: Inputs, weights: dict[str, Tensor] | None
    ) -> tuple[Lease | None, Payload] | None:
        """Run a forward; return its outputs with the slot's lease if it keeps what a backward needs.

        None where it has to run uncaptured.
        """
        if weights is not None or "F" in self._uncaptured:
            return None
        program, keeps = self.program, torch.is_grad_enabled()
        with torch.no_grad():
            given = program.given(program.own, keys, arrived, inputs)
            try:
                lease, made = self._forward(given, keeps)
            except GraphError as error:
                self._give_up("F", error)
                return None
        return lease if keeps else None, program.taken(made)

    def _forward(self, given: Sequence[Tensor], keeps: bool) -> tuple[Lease, list[Tensor]]:
        program = self.program
        held = len(program.own) + len(program.buffers)
        where = [x.data_ptr() for x in given[:held]]
        if where != self._where:  # a slot that is in use is dropped when its micro-batch is done
            self._where, self._free = where, {True: [], False: []}
        free = self._free[keeps]
        slot = free.pop() if free else None
        if slot is None:
            copied = range(held, len(given) - len(program.casts))
            slot = Slot(program, self._graphs, self._gradients, given, copied)
        lease = Lease(slot, free)
        return lease, slot.forward(given, keeps)

    def run_backward(self, lease: Lease, tangents: Sequence[Tensor]) -> list[Tensor | None]:
        """Run a backward; see ``StageProgram.run_backward``."""
        slot, queue, whole = lease.slot, self.program.queue, self.program.queue.whole
        slot.take(tangents)
        kind = BW if whole else "B"
        if kind not in self._uncaptured:
            try:
                back = slot.backward(whole)
            except GraphError as error:
                self._give_up(kind, error)
            else:
                queue.current.append(Closure(lease.hold if whole else partial(self._weights, lease), self._trained))
                return back
        back, waiting = slot.eager_backward()
        queue.current += [*waiting, Closure(lease.hold, ())]
        return back

    def _weights(self, lease: Lease) -> None:
        if "W" not in self._uncaptured:
            try:
                lease.slot.weights()
            except GraphError as error:
                self._give_up("W", error)
                self._uncaptured.add("B")
            else:
                return
        for closure in lease.slot.eager_backward()[1]:
            closure.compute()

    def _give_up(self, kind: str, error: GraphError) -> None:
        self._uncaptured.add(kind)
        self._note(kind, str(error).strip().partition("\n")[0] or type(error.__cause__).__name__)


class CapturedRun:
    """The tensors that the captured forward of a whole stage leaves for its backward."""

    __slots__ = ("_captured", "_lease", "_unfed")

    def __init__(self, captured: CapturedProgram, lease: Lease, outputs: Payload) -> None:
        self._captured, self._lease = captured, lease
        self._unfed = captured.program.unfed(outputs)

    def backward(
        self, stage: StageModule, inputs: Payload, gradients: Sequence[Tensor], turns: Alternation | None
    ) -> Payload:
        """See OwnGraph.backward."""
        program = self._captured.program
        with torch.no_grad():
            back = self._captured.run_backward(self._lease, program.wanted(self._unfed, gradients))
            return program.sent_back(inputs, back)


class _RunGraph(torch.autograd.Function):
    """Gives the outputs of a captured segment their backward; see ``compiled.program``."""

    @staticmethod
    def forward(
        ctx: Any, captured: CapturedProgram, lease: Lease, outputs: Payload, _: Tensor | None, *arrived: Tensor
    ) -> Payload:
        ctx.captured, ctx.lease = captured, lease
        differentiable = captured.program.differentiable
        ctx.mark_non_differentiable(*(y for y, one in zip(outputs, differentiable, strict=True) if not one))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        program = ctx.captured.program
        wanted = [g.contiguous() for g, one in zip(gradients, program.differentiable, strict=True) if one]
        back = iter(ctx.captured.run_backward(ctx.lease, wanted))
        ctx.lease = None
        return None, None, None, None, *(next(back) if takes else None for takes in program.takes_gradient)


class CapturedStage:
    """A compiled stage whose programs run as graphs."""

    def __init__(self, stage: CompiledStage, graphs: DeviceGraphs, gradients: FixedGradients, note: Note) -> None:
        self.stage = stage
        self._captured = {
            id(program): CapturedProgram(program, graphs, gradients, note)
            for programs in stage.programs.values()
            for program in programs
        }

    def find(self, arrived: Payload, inputs: Inputs, segment: Segment | None) -> Forward | None:
        """See ``CompiledStage.find``."""
        for program in self.stage.programs.get(span_of(segment), ()):
            if program.fits(arrived, inputs):
                captured = self._captured[id(program)]
                return captured if segment is None else captured.in_graph
        return None

    def find_validation(self, arrived: Payload, inputs: Inputs) -> Forward | None:
        """Return the program of a validation, which is not captured: too few run to pay for slots of their own."""
        return self.stage.find_validation(arrived, inputs)


class TaskGraphs:
    """Captures the compiled stages of one device; with ``refused``, which says why, it leaves them as they are."""

    def __init__(self, graphs: DeviceGraphs, refused: str | None = None) -> None:
        self._graphs, self._refused = graphs, refused
        self._notes = [] if refused is None else [f"stages run compiled, and not as CUDA graphs: {refused}"]

    def captured(self, executor: Executor, ready: Mapping[StageKey, CompiledStage]) -> dict[StageKey, CompiledForward]:
        """Return the stages of an executor as such that run as graphs."""
        if self._refused is not None:
            return dict(ready)
        return {
            key: CapturedStage(
                stage, self._graphs, FixedGradients(executor.sync.keep_memory(key)), partial(self._note, key)
            )
            for key, stage in ready.items()
        }

    def _note(self, key: StageKey, kind: str, why: str) -> None:
        copy = f" of copy {key[1]}" if key[1] else ""
        self._notes.append(f"{kind} of stage {key[0]}{copy} runs compiled, and not as a CUDA graph: {why}")

    def take_notes(self) -> tuple[str, ...]:
        """Return what there is to say of tasks that are not captured, once."""
        notes, self._notes = tuple(self._notes), []
        return notes


def task_graphs(setup: Setup, device: torch.device) -> TaskGraphs | None:
    """Return what captures the compiled stages of a device; None where ``train.cuda_graphs`` does not want it."""
    wanted = setup.job.train.cuda_graphs
    if device.type != "cuda" or not (wanted == "tasks" or (wanted == "auto" and setup.parallel.devices > 1)):
        return None
    refused = None
    if setup.sharding is not None:
        refused = "what its copies divide moves in memory"
    elif setup.versions != "flush":
        refused = "its schedule keeps several versions of the weights"
    elif setup.tensor > 1:
        refused = "its host waits for the collectives of tensor ranks"
    return TaskGraphs(CudaGraphs(device), refused)
