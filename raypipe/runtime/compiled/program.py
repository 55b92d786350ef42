"""The compiled program of a stage: its pieces as functions, one autograd function around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raypipe.errors import RunError
from raypipe.models import Inputs
from raypipe.models.keyed_random import current_keys
from raypipe.runtime.compiled.accumulate import later_closures, ready_closures
from raypipe.runtime.compiled.layout import Interface, Layout
from raypipe.runtime.runner import Payload
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.transport.channel import TensorSpec

Compiled = Callable[[list[Tensor]], Sequence[Tensor]]
"""Takes the inputs in a list, which it empties; returns the outputs."""
Values = dict[str, Sequence[Tensor] | Mapping[int, Tensor]]
"""Tensors by source and number; see ``Slot``."""


@dataclass(frozen=True)
class CompiledPiece:
    """A piece and what computes it."""

    piece: Interface
    run: Compiled

    def inputs(self, values: Values) -> list[Tensor]:
        """Return the piece's inputs."""
        return [values[slot.source][slot.number] for slot in self.piece.slots]

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


class StageProgram:
    """Runs a stage, or a segment of it, on micro-batches of one shape.

    Args:
        module: the stage.
        layout: what its inputs and outputs mean.
        pieces: what it was cut and compiled into.
        shapes: of the tensors that arrive and of the raw inputs.
    """

    def __init__(self, module: StageModule, layout: Layout, pieces: Pieces, shapes: Sequence[TensorSpec]) -> None:
        self.pieces, self.queue, self.shapes = pieces, module.queue, tuple(shapes)
        self.inputs, self.places, self.casts = layout.inputs, layout.places, layout.casts
        self.differentiable, self.takes_gradient = layout.differentiable, layout.takes_gradient
        self.statistics = [module.statistics[i] for i in layout.statistics]
        self._paths = layout.parameters
        held, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        self._own = [held[path] for path in layout.parameters]
        self._buffers = [buffers[name] for name in layout.buffers]
        self._device = self._own[0].device if self._own else torch.device("cpu")
        self._anchor = layout.trained[0] if layout.trained else None
        backward = [p.piece for p in (pieces.backward, pieces.input_grad, pieces.weight_grad) if p is not None]
        slots = {slot for piece in backward for slot in piece.slots if slot.source == "given"}
        self.read_again = tuple(sorted(slot.number for slot in slots))
        """The forward's inputs that a backward reads, by number."""

    def fits(self, arrived: Payload, inputs: Inputs) -> bool:
        """Return whether the program was compiled for tensors of these shapes."""
        given = (*arrived, *(inputs[name] for name in self.inputs))
        return len(given) == len(self.shapes) and all(
            x.shape == spec.shape and x.dtype == spec.dtype for x, spec in zip(given, self.shapes, strict=True)
        )

    def __call__(self, arrived: Payload, inputs: Inputs, weights: dict[str, Tensor] | None) -> Payload:
        """Run the forward under the current random keys; its outputs carry a graph if gradients are enabled.

        ``weights``: the weight version to run on, by path; None for the stage's own.
        """
        parameters: list[Tensor] = list(self._own)
        if weights is not None:  # frozen parameters have one version
            parameters = [weights.get(path, own) for path, own in zip(self._paths, self._own, strict=True)]
        given = self._given(parameters, arrived, inputs)
        if not torch.is_grad_enabled():
            only = self.pieces.forward_only
            made = (self.pieces.forward if only is None else only)({"given": given})
            return self._taken(made)
        anchor = None if self._anchor is None else parameters[self._anchor]
        outputs: Payload = _Run.apply(self, parameters, given, anchor, *arrived)  # type: ignore[no-untyped-call]
        return outputs

    def _given(self, parameters: Sequence[Tensor], arrived: Payload, inputs: Inputs) -> list[Tensor]:
        keys = current_keys()
        if keys is None:
            raise RunError("a compiled stage", "no random keys are set", "run it within random_keys(...)")
        given = [*parameters, *self._buffers]
        given += [x.contiguous() for x in arrived]
        given += [inputs[name].contiguous() for name in self.inputs]
        given += self.places.tables(keys, self._device)
        given += [self.queue.copy_in(parameters[number], dtype) for number, dtype in self.casts]
        return given

    def _taken(self, made: Sequence[Tensor]) -> Payload:
        """Return the outputs of the stage among those of the forward, and note the moments of batch norms."""
        count = len(self.differentiable)
        for one, moments in zip(self.statistics, made[count:], strict=False):
            one.note(moments)
        return tuple(made[:count])

    def run_forward(self, given: Sequence[Tensor]) -> tuple[Payload, Sequence[Tensor]]:
        """Run the forward; return its outputs and what it keeps."""
        made = self.pieces.forward({"given": given})
        return self._taken(made), made[len(self.differentiable) + len(self.statistics) :]

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
            queue.current += ready_closures(piece.gradients, made, parameters)
        else:
            made = split(values)
            piece = split.piece
            values["handed"] = made[piece.hands :]
            queue.current += ready_closures(piece.gradients, made, parameters)
            waiting = weights.inputs(values)
            queue.current += later_closures(weights.piece.gradients, lambda: weights.run(_emptied(waiting)), parameters)
        return [None if at is None else made[at] for at in piece.back]


def _emptied(values: list[Tensor]) -> list[Tensor]:
    """Return the values and keep none of them."""
    found = list(values)
    values.clear()
    return found


class _Run(torch.autograd.Function):
    """The forward and backward of a compiled stage, for autograd.

    Parameters are no differentiable arguments: their gradients are accumulated by the stage's queue. One of them, the
    anchor, is an argument so that the outputs require a gradient even where nothing that arrives does.
    """

    @staticmethod
    def forward(
        ctx: Any, program: StageProgram, parameters: Sequence[Tensor], given: list[Tensor], _: Tensor | None,
        *arrived: Tensor,
    ) -> Payload:  # fmt: skip
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
            "given": dict(zip(program.read_again, saved[:count], strict=True)), "kept": saved[count:],
            "tangent": wanted,
        }  # fmt: skip
        back = iter(program.run_backward(values, ctx.parameters))
        return None, None, None, None, *(next(back) if takes else None for takes in program.takes_gradient)
