"""What is due after a step, and so where the next call of the workers ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from raypipe.job.train_spec import TrainSpec
from raypipe.observe.run_dir import Stop, asked_to_evaluate, asked_to_save
from raypipe.runtime.saving.neighbour_copies import NeighbourCopies
from raypipe.runtime.saving.saves import Saves
from raypipe.schedule.lowering.asynchronous import WHOLE, Part


class Due(NamedTuple):
    """What follows a step before the next one."""

    evaluates: bool
    saves: bool
    copies: bool

    @property
    def anything(self) -> bool:
        """Whether devices do anything but the next step, so that an asynchronous pipeline drains."""
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
        evaluates = (
            asked_to_evaluate(self._directory) or last or bool(train.eval_every and done % train.eval_every == 0)
        )
        forced = asked_to_save(self._directory) or last or stop is not None or self._saves.overdue
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
