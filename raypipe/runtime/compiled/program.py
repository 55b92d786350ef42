"""The compiled program of a stage: its pieces as functions, and what leads from a forward to its backward.

A whole stage needs no autograd: its forward leaves a ``ProgramRun``, whose backward the executor calls. Segments of a
stage are one autograd function each (``in_graph``), since autograd joins them to the segments that run eagerly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from itertools import accumulate as running_sums
from typing import Any

import torch
from torch import Tensor

from raypipe.compat.torch_private import _foreach_add_
from raypipe.errors import RunError
from raypipe.models import Inputs
from raypipe.models.keyed_random import RandomKeys
from raypipe.runtime.backward.deferred import Closure, accumulate
from raypipe.runtime.backward.segments import Segment
from raypipe.runtime.compiled.layout import Gradient, GraphLayout, Interface
from raypipe.runtime.executor.computation import CompiledForward, Forward
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.executor.step import StageReport
from raypipe.runtime.stage.alternate import Alternation
from raypipe.runtime.stage.stage import OwnGraph, StageModule
from raypipe.runtime.transport.channel import Payload, TensorSpec
from raypipe.schedule.sharding import StageKey

Outputs = Callable[[], Sequence[Tensor]]
"""Returns the outputs of a piece."""


class Accumulation:
    """Adds the weight gradients that a piece computes.

    Products, which cost as much as all else in W, have a closure each; all others are added by one call.
    """

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        self._products = [
            (gradient.parameter, gradient.first, gradient.second)
            for gradient in gradients
            if gradient.second is not None
        ]
        self._others = tuple(gradient for gradient in gradients if gradient.second is None)

    def ready(self, values: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Closure]:
        """Return closures that add the gradients, whose values are there.

        Args:
            values: the outputs of the piece.
            parameters: the stage's, in order; those of another weight version where the forward ran on one.
        """
        return self._closures(parameters, lambda: values)

    def later(self, compute: Outputs, parameters: Sequence[Tensor]) -> list[Closure]:
        """Return closures of which the first computes the values: ``compute`` is called once, when W runs."""
        if not self._products and not self._others:
            return []
        held: list[Sequence[Tensor]] = []
        first = Closure(lambda: held.append(compute()), ())
        return [first, *self._closures(parameters, lambda: held[0])]

    def _closures(self, parameters: Sequence[Tensor], values: Outputs) -> list[Closure]:
        closures = []
        for number, first, second in self._products:
            parameter = parameters[number]
            closures.append(Closure(partial(_add_product, parameter, values, first, second), (parameter,)))
        if self._others:
            of = tuple(parameters[other.parameter] for other in self._others)
            closures.append(Closure(lambda: _add(self._others, of, values()), of))
        return closures


def _add_product(parameter: Tensor, values: Outputs, first: int, second: int) -> None:
    """Add a product to a parameter's gradient: in one pass, without a temporary of its size, where dtypes allow."""
    made, total = values(), parameter.grad
    a, b = made[first], made[second]
    if total is not None and total.dtype == a.dtype == b.dtype:
        total.addmm_(a, b)
    else:
        accumulate(parameter, a.mm(b.to(a.dtype)))


def _add(gradients: Sequence[Gradient], parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Add gradients that are there to their parameters'."""
    sums, added = [], []
    for one, parameter in zip(gradients, parameters, strict=True):
        value, total = values[one.first], parameter.grad
        if total is None:
            accumulate(parameter, value.clone() if one.shared else value)
        else:
            sums.append(total)
            added.append(value)
    if sums:
        _foreach_add_(sums, added)


Compiled = Callable[[list[Tensor]], Sequence[Tensor]]
"""Takes the inputs in a list, which it empties; returns the outputs."""
Values = dict[str, Sequence[Tensor] | Mapping[int, Tensor]]
"""Tensors by source and number; see ``Slot``."""


@dataclass
class CompiledPiece:
    """A piece and what computes it."""

    piece: Interface
    run: Compiled

    @cached_property
    def accumulation(self) -> Accumulation:
        """Return the object that adds the piece's weight gradients."""
        return Accumulation(self.piece.gradients)

    def inputs(self, values: Values) -> list[Tensor]:
        """Return the piece's inputs."""
        return [values[source][number] for source, number in self.piece.slots]

    def __call__(self, values: Values) -> Sequence[Tensor]:
        """Run the piece."""
        return self.run(self.inputs(values))


@dataclass(frozen=True)
class Pieces:
    """The compiled pieces of a stage; those that the schedule has no use for are None."""

    forward: CompiledPiece
    forward_only: CompiledPiece | None = None
    backward: CompiledPiece | None = None
    input_grad: CompiledPiece | None = None
    weight_grad: CompiledPiece | None = None

    @property
    def collectives(self) -> list[tuple[str, ...] | None]:
        """Return what each piece has of them."""
        pieces = (getattr(self, one.name) for one in fields(self))
        return [None if one is None else one.piece.collectives for one in pieces]


class StageProgram:
    """Runs a stage, or a segment of it, on micro-batches of one shape.

    Args:
        module: the stage.
        layout: what its inputs and outputs mean.
        pieces: what it was cut and compiled into.
        shapes: of the tensors that arrive and of the raw inputs.
    """

    def __init__(self, module: StageModule, layout: GraphLayout, pieces: Pieces, shapes: Sequence[TensorSpec]) -> None:
        self.pieces, self.queue, self.shapes = pieces, module.queue, tuple(shapes)
        self.copy_in = module.queue.copy_in
        self.inputs, self.places, self.casts = layout.inputs, layout.places, layout.casts
        self.differentiable, self.takes_gradient = layout.differentiable, layout.takes_gradient
        self.statistics = [module.statistics[i] for i in layout.statistics]
        self._paths = layout.parameters
        held, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        self.own = [held[path] for path in layout.parameters]
        self.buffers = [buffers[name] for name in layout.buffers]
        self._device = self.own[0].device if self.own else torch.device("cpu")
        self.anchor = layout.trained[0] if layout.trained else None
        backward = [p.piece for p in (pieces.backward, pieces.input_grad, pieces.weight_grad) if p is not None]
        slots = {slot for piece in backward for slot in piece.slots if slot.source == "given"}
        self.read_again = tuple(sorted(slot.number for slot in slots))
        """The forward's inputs that a backward reads, by number."""
        received = running_sums(module.gives_gradient, initial=0)
        places = [place if gives else None for place, gives in zip(received, module.gives_gradient, strict=False)]
        self.tangents = tuple(
            (n, place) for n, (place, one) in enumerate(zip(places, layout.differentiable, strict=False)) if one
        )
        """Of a whole stage, per differentiable output: its number, and the place of its gradient among those that the
        stage receives; None if it receives none."""

    def fits(self, arrived: Payload, inputs: Inputs) -> bool:
        """Return whether the program was compiled for tensors of these shapes."""
        given = (*arrived, *(inputs[name] for name in self.inputs))
        return len(given) == len(self.shapes) and all(
            x.shape == spec.shape and x.dtype == spec.dtype for x, spec in zip(given, self.shapes, strict=True)
        )

    def __call__(
        self, keys: Callable[[], RandomKeys], arrived: Payload, inputs: Inputs, weights: dict[str, Tensor] | None
    ) -> tuple[Payload, OwnGraph | None]:
        """Run the forward of a whole stage.

        Args:
            keys: makes the random keys of the micro-batch.
            arrived: what the stage received.
            inputs: the raw inputs.
            weights: the weight version to run on, by path; None for the stage's own.

        Returns:
            The outputs, and if gradients are enabled, what runs the backward.
        """
        parameters = self._parameters(weights)
        given = self.given(parameters, keys, arrived, inputs)
        if not torch.is_grad_enabled():
            return self._forward_only(given), None
        with torch.no_grad():
            outputs, kept = self.run_forward(given)
        return outputs, ProgramRun(self, parameters, given, kept, outputs)

    def in_graph(
        self, keys: Callable[[], RandomKeys], arrived: Payload, inputs: Inputs, weights: dict[str, Tensor] | None
    ) -> tuple[Payload, OwnGraph | None]:
        """Run the forward of a segment; its outputs carry a graph if gradients are enabled. See ``__call__``."""
        parameters = self._parameters(weights)
        given = self.given(parameters, keys, arrived, inputs)
        if not torch.is_grad_enabled():
            return self._forward_only(given), None
        anchor = None if self.anchor is None else parameters[self.anchor]
        outputs: Payload = _Run.apply(self, parameters, given, anchor, *arrived)  # type: ignore[no-untyped-call]
        return outputs, None

    def _parameters(self, weights: dict[str, Tensor] | None) -> Sequence[Tensor]:
        if weights is None:
            return self.own
        return [weights.get(path, own) for path, own in zip(self._paths, self.own, strict=True)]  # or it is frozen

    def given(
        self, parameters: Sequence[Tensor], keys: Callable[[], RandomKeys], arrived: Payload, inputs: Inputs
    ) -> list[Tensor]:
        """Return the inputs of the forward: parameters, buffers, what arrives, the raw inputs, the keys, and casts of
        parameters."""
        given = [*parameters, *self.buffers]
        given += [x.contiguous() for x in arrived]
        given += [inputs[name].contiguous() for name in self.inputs]
        if self.places.own or self.places.shared:
            given += self.places.tables(keys(), self._device)
        given += [self.copy_in(parameters[number], dtype) for number, dtype in self.casts]
        return given

    def _forward_only(self, given: Sequence[Tensor]) -> Payload:
        only = self.pieces.forward_only
        return self.taken((self.pieces.forward if only is None else only)({"given": given}))

    def taken(self, made: Sequence[Tensor]) -> Payload:
        """Return the outputs of the stage among those of the forward, and note the moments of batch norms."""
        count = len(self.differentiable)
        for one, moments in zip(self.statistics, made[count:], strict=False):
            one.note(moments)
        return tuple(made[:count])

    def wanted(self, unfed: Mapping[int, Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of a whole stage's differentiable outputs from those received; zeros of ``unfed``."""
        return [
            torch.zeros_like(unfed[n]) if place is None else gradients[place].contiguous() for n, place in self.tangents
        ]

    def unfed(self, outputs: Payload) -> dict[int, Tensor]:
        """Return the differentiable outputs of a whole stage that receive no gradient, by number."""
        return {n: outputs[n] for n, place in self.tangents if place is None}

    def sent_back(self, inputs: Payload, back: Sequence[Tensor | None]) -> Payload:
        """Return the gradients that a whole stage sends back, from those of ``run_backward``."""
        arrived = (x for x, takes in zip(inputs, self.takes_gradient, strict=True) if takes)
        return tuple(torch.zeros_like(x) if made is None else made for x, made in zip(arrived, back, strict=True))

    def run_forward(self, given: Sequence[Tensor]) -> tuple[Payload, Sequence[Tensor]]:
        """Run the forward; return its outputs and what it keeps."""
        made = self.pieces.forward({"given": given})
        return self.taken(made), made[len(self.differentiable) + len(self.statistics) :]

    def run_backward(self, values: Values, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Run the backward of a micro-batch; return the gradients of the arrived tensors that get one.

        Weight gradients, or their computation, are left in the stage's queue.
        """
        pieces, queue = self.pieces, self.queue
        split, weights = pieces.input_grad, pieces.weight_grad
        if split is None or weights is None or (queue.whole and pieces.backward is not None):
            assert pieces.backward is not None
            made = pieces.backward(values)
            piece = pieces.backward.piece
            queue.current += pieces.backward.accumulation.ready(made, parameters)
        else:
            made = split(values)
            piece = split.piece
            values["handed"] = made[piece.hands :]
            queue.current += split.accumulation.ready(made, parameters)
            waiting = weights.inputs(values)
            queue.current += weights.accumulation.later(lambda: weights.run(_emptied(waiting)), parameters)
        return [None if at is None else made[at] for at in piece.back]


def _emptied(values: list[Tensor]) -> list[Tensor]:
    """Return the values and keep none of them."""
    result = list(values)
    values.clear()
    return result


class ProgramRun:
    """The tensors that the forward of a whole stage leaves for its backward.

    Args:
        program: the stage's.
        parameters: those that the forward ran on.
        given: the forward's inputs.
        kept: what it keeps for the backward besides them.
        outputs: of the stage.
    """

    __slots__ = ("_again", "_kept", "_parameters", "_program", "_unfed", "_versions")

    def __init__(
        self,
        program: StageProgram,
        parameters: Sequence[Tensor],
        given: Sequence[Tensor],
        kept: Sequence[Tensor],
        outputs: Payload,
    ) -> None:
        self._program, self._parameters, self._kept = program, parameters, kept
        self._again = [given[number] for number in program.read_again]
        self._versions = [x._version for x in self._again]
        self._unfed = program.unfed(outputs)

    @property
    def saved(self) -> list[Tensor]:
        """All tensors that it holds on to for the backward."""
        return [*self._again, *self._kept]

    def backward(
        self, stage: StageModule, inputs: Payload, gradients: Sequence[Tensor], turns: Alternation | None
    ) -> Payload:
        """See OwnGraph.backward.

        Raises:
            RunError: a tensor that the backward reads has been overwritten since the forward.
        """
        program, again = self._program, self._again
        if [x._version for x in again] != self._versions:
            raise RunError(
                "a compiled stage",
                "weights or inputs of a micro-batch were overwritten between forward and backward",
                "this is a fault of raypipe: report it with the run's plan.json",
            )
        with torch.no_grad():
            values: Values = {
                "given": dict(zip(program.read_again, again, strict=True)),
                "kept": self._kept,
                "tangent": program.wanted(self._unfed, gradients),
            }
            return program.sent_back(inputs, program.run_backward(values, self._parameters))


class _Run(torch.autograd.Function):
    """The forward and backward of a segment of a compiled stage, for autograd.

    Parameters are no differentiable arguments: their gradients are accumulated by the stage's queue. One of them, the
    anchor, is an argument so that the outputs require a gradient even where nothing that arrives does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        program: StageProgram,
        parameters: Sequence[Tensor],
        given: list[Tensor],
        _: Tensor | None,
        *arrived: Tensor,
    ) -> Payload:
        outputs, kept = program.run_forward(given)
        ctx.program, ctx.parameters = program, parameters
        ctx.save_for_backward(*(given[number] for number in program.read_again), *kept)
        # A tensor that is returned twice, or passed through, gets a history of its own.
        own = tuple(y.view_as(y) if any(y is x for x in (*outputs[:n], *arrived)) else y for n, y in enumerate(outputs))
        ctx.mark_non_differentiable(*(y for y, one in zip(own, program.differentiable, strict=True) if not one))
        return own

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        program, saved = ctx.program, ctx.saved_tensors
        count = len(program.read_again)
        wanted = [g.contiguous() for g, one in zip(gradients, program.differentiable, strict=True) if one]
        values: Values = {
            "given": dict(zip(program.read_again, saved[:count], strict=True)),
            "kept": saved[count:],
            "tangent": wanted,
        }
        back = iter(program.run_backward(values, ctx.parameters))
        return None, None, None, None, *(next(back) if takes else None for takes in program.takes_gradient)


# A stage that has compiled programs: which of them runs, and what runs eagerly instead.


Span = tuple[int, int] | None
"""First part of a segment and the end (exclusive); None for a whole stage."""


def span_of(segment: Segment | None) -> Span:
    """Return the span of a segment."""
    return None if segment is None else (segment.begin, segment.end)


@dataclass(frozen=True)
class StagePart:
    """The pieces of a stage, or of a segment of it, compiled for one shape of micro-batches."""

    span: Span
    layout: GraphLayout
    shapes: tuple[TensorSpec, ...]
    pieces: dict[str, tuple[Interface, Any]]
    """By the names of ``Pieces``: inputs and outputs, and what computes it, a function or the source of one. Those that
    the schedule has no use for are missing."""
    validates: bool = False
    """Whether it is the stage's forward in validations."""


@dataclass
class CompiledStage:
    """The programs of one stage replica. Whatever they do not fit runs eagerly."""

    programs: dict[Span, list[StageProgram]] = field(default_factory=dict)
    validation: list[StageProgram] = field(default_factory=list)
    """Whole forwards in which nothing is dropped; see ``Example.training``."""

    @classmethod
    def of(
        cls, module: StageModule, parts: Iterable[StagePart], load: Callable[[Any], Compiled] = lambda run: run
    ) -> CompiledStage:
        """Return a stage of compiled parts; ``load`` returns the function that computes a piece."""
        made = cls()
        for part in parts:
            pieces = Pieces(**{name: CompiledPiece(piece, load(run)) for name, (piece, run) in part.pieces.items()})
            program = StageProgram(module, part.layout, pieces, part.shapes)
            programs = made.validation if part.validates else made.programs.setdefault(part.span, [])
            programs.append(program)
        return made

    @property
    def collectives(self) -> int:
        """Return a number above 0, alike for tensor ranks that start the same collectives in one order."""
        programs = [*self.programs.items(), ("validation", self.validation)]
        said = [(span, [(one.shapes, one.pieces.collectives) for one in some]) for span, some in programs]
        return 1 + int.from_bytes(hashlib.sha256(repr(said).encode()).digest()[:7], "big")

    def find(self, arrived: Payload, inputs: Inputs, segment: Segment | None) -> Forward | None:
        """Return the program for these tensors; None if they have other shapes than any was compiled for."""
        program = fitting(self.programs.get(span_of(segment), ()), arrived, inputs)
        return program if program is None or segment is None else program.in_graph

    def find_validation(self, arrived: Payload, inputs: Inputs) -> Forward | None:
        """Return the program of a validation for these tensors; None if there is none."""
        return fitting(self.validation, arrived, inputs)


def fitting(programs: Iterable[StageProgram], arrived: Payload, inputs: Inputs) -> StageProgram | None:
    """Return the program that was compiled for tensors of these shapes."""
    return next((program for program in programs if program.fits(arrived, inputs)), None)


def swap_in(executor: Executor, ready: Mapping[StageKey, CompiledForward]) -> None:
    """Run these stages compiled from the next step on, and all others eagerly."""
    for key, module in executor.modules.items():
        was, now = key in executor.computation.compiled, key in ready
        if was != now:
            module.defers = now or module.splits
    executor.computation.compiled = dict(ready)


Outcome = list[tuple[StageKey, CompiledStage | None, StageReport]]
"""What became of stages that were to be compiled."""
