"""Call the workers: which steps the next call holds, what is due after them, and the ticket of what it returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from raypipe.job.train_spec import TrainSpec
from raypipe.observe.run_dir import EVALUATE, SAVE, Stop, asked
from raypipe.plan.online.measured_steps import StepClock
from raypipe.runtime.executor.step import MOST_STEPS, StepResult
from raypipe.runtime.saving.neighbour_copies import NeighbourCopies
from raypipe.runtime.saving.saves import Save, Saves
from raypipe.schedule.lowering.asynchronous import WHOLE, Part


class Due(NamedTuple):
    """The work that follows a step before the next one."""

    evaluates: bool
    saves: bool
    copies: bool

    @property
    def anything(self) -> bool:
        """Return whether devices do anything but the next step, so that an asynchronous pipeline drains."""
        return any(self)


class StepsToQueue(NamedTuple):
    """The steps of the next call."""

    parts: Sequence[Part]
    """How each begins and ends."""
    due: Due
    """After the last one."""


class Dues:
    """Says what is due in one attempt at a run."""

    def __init__(self, train: TrainSpec, directory: Path, saves: Saves, copies: NeighbourCopies) -> None:
        self._train, self._directory, self._saves, self._copies = train, directory, saves, copies

    def after(self, done: int, stop: Stop | None) -> Due:
        """Return what is due after ``done`` steps; ``stop``: what ends the run there, or None.

        A save or a validation that was asked for from outside is due once: after the step that this is called for.
        """
        train = self._train
        last = done == train.steps or (stop is not None and not stop.pauses)
        evaluates = asked(self._directory, EVALUATE) or last or bool(train.eval_every and done % train.eval_every == 0)
        forced = asked(self._directory, SAVE) or last or stop is not None or self._saves.overdue
        saves = forced or bool(train.checkpoint_every and done % train.checkpoint_every == 0)
        return Due(evaluates, saves, self._copies.due(done))

    def next_call(self, done: int, most: int, fills: bool, flushes: bool, stop: Stop | None) -> StepsToQueue:
        """Return the steps that follow ``done`` ones: up to the first after which anything is due.

        Args:
            done: number of steps queued so far.
            most: steps that one call may hold.
            fills: whether an asynchronous pipeline is empty by then.
            flushes: whether every step empties the pipeline.
            stop: what ends the run after the next step, or None.
        """
        parts: list[Part] = []
        while True:
            due = self.after(done + len(parts) + 1, stop)
            parts.append(WHOLE if flushes else (fills, due.anything))
            fills = due.anything
            if due.anything or len(parts) >= most:
                return StepsToQueue(parts, due)


# A ticket: one call that the driver has queued with every worker, and whose results it has yet to collect.


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


# How many steps go into one call of the workers.
#
# A call costs about a millisecond in which a device computes nothing, and as much of a processor's time again in the
# driver, which shares the host's cores with CPU devices. So short steps are asked for together: as many as take
# ``CALL_S``. Their results, and what follows from them (a log line, another plan, a stop), come that much later.
# Nothing else may lie between two steps of a call: the driver ends a call before a validation, a save or a copy.

CALL_S = 0.1
"""Longest call of several steps."""
MEASURED = 3
"""Newest steps of which the longest counts, so that one that seems short does not make a call long."""


class StepsPerCall:
    """Follows the time that steps take."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=MEASURED)

    def took(self, step_s: float) -> None:
        """Note how long a step took, in seconds."""
        self._newest.append(step_s)

    def forget(self) -> None:
        """Begin again, because steps may take another time from now on."""
        self._newest.clear()

    @property
    def step_s(self) -> float | None:
        """Seconds of the shortest of the newest steps; None if none is known."""
        return min(self._newest, default=None)

    @property
    def most(self) -> int:
        """Steps that the next call may hold.

        >>> calls = StepsPerCall()
        >>> for step_s in (0.024, 0.015, 0.02):
        ...     calls.took(step_s)
        >>> calls.most
        4
        """
        if len(self._newest) < MEASURED:
            return 1
        return max(1, min(MOST_STEPS, int(CALL_S / max(self._newest))))
