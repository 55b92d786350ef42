"""A ticket: one call that the driver has queued with every worker, and whose results it has yet to collect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from raypipe.plan.online.measured_steps import StepClock
from raypipe.runtime.executor.step import StepResult
from raypipe.runtime.saving.saves import Save
from raypipe.schedule.lowering.asynchronous import Part


class DoneStep(NamedTuple):
    """One step of a call, with what came back."""

    step: int
    """Its number, from 1."""
    part: Part
    results: list[StepResult | None]
    """By rank; None where a result was lost with its worker."""


@dataclass(slots=True)
class Ticket:
    """Some steps, a validation, a save or a copy."""

    kind: Literal["step", "eval", "save", "copy"]
    step: int
    """Number of steps done when this call has finished."""
    refs: list[Any]
    clock: StepClock
    parts: Sequence[Part] = ()
    """How each of its steps begins and ends."""
    save: Save | None = None

    def steps(self, results: Sequence[Sequence[StepResult] | None]) -> list[DoneStep]:
        """Return its steps; ``results``: by rank, those of all of them, or None where they were lost."""
        first = self.step - len(self.parts)
        return [
            DoneStep(first + k + 1, part, [None if of_rank is None else of_rank[k] for of_rank in results])
            for k, part in enumerate(self.parts)
        ]

    def reports(self, results: Sequence[Any]) -> list[Any]:
        """Return what each worker reports beside its steps, as writes that have ended: it comes with the last one."""
        if self.kind != "step":
            return list(results)
        return [None if of_rank is None else of_rank[-1] for of_rank in results]
