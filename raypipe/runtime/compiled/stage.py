"""A stage that has compiled programs: which of them runs, and what runs eagerly instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from raypipe.models import Inputs
from raypipe.runtime.backward.segments import Segment
from raypipe.runtime.compiled.program import StageProgram
from raypipe.runtime.executor.computation import CompiledForward, Forward
from raypipe.runtime.executor.executor import Executor
from raypipe.runtime.transport.channel import Payload
from raypipe.runtime.update.gradients import StageKey

Span = tuple[int, int] | None
"""First part of a segment and the end (exclusive); None for a whole stage."""


def span_of(segment: Segment | None) -> Span:
    """Return the span of a segment."""
    return None if segment is None else (segment.begin, segment.end)


@dataclass
class CompiledStage:
    """The programs of one stage replica. Whatever they do not fit runs eagerly."""

    programs: dict[Span, list[StageProgram]] = field(default_factory=dict)
    validation: list[StageProgram] = field(default_factory=list)
    """Whole forwards in which nothing is dropped; see ``tracing.joint.trace_validation``."""

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
