"""A run's newest consecutive steps as devices reported them, kept so that ``raypipe explain`` can take them apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from raypipe.errors import SpecError
from raypipe.schedule.forms.text import from_text, to_text
from raypipe.schedule.ir import Schedule

KEPT = 9
"""Steps that are kept: one that leads in, and eight."""
KEPT_TASKS = 40_000
"""Most tasks in them; of larger steps fewer are kept, but never fewer than ``FEWEST``."""
FEWEST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWaits:
    """Waits of devices inside a step, in seconds; what is empty was not measured."""

    data_s: tuple[float, ...] = ()
    """Per device, in its first forward: for its samples."""
    gather_s: tuple[Mapping[int, float], ...] = ()
    """Per device: position of a task in its order -> in it, for gathered weights."""
    sums_s: tuple[float, ...] = ()
    """Per device, before its first update: for gradient sums."""
    message_s: tuple[Mapping[int, tuple[float, float]], ...] = ()
    """Per device: position of a task in its order -> before it, for messages, and from then to its start; the shortest
    waits are left out."""


NO_WAITS = StepWaits()
_WAITS = TypeAdapter(StepWaits)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step as devices reported it."""

    number: int
    """Its number in the run, from 1."""
    times: tuple[NDArray[np.float64], ...]
    """Per device ``[tasks, 2]``: start and end of each task in the order of the schedule, on one clock, in seconds."""
    waits: StepWaits = NO_WAITS


@dataclass(slots=True)
class RecordedSteps:
    """The newest steps of one schedule that followed one another without anything in between."""

    schedule: Schedule
    """As devices run it."""
    steps: deque[RecordedStep] = field(default_factory=deque)

    def add(self, step: RecordedStep, follows: bool) -> None:
        """Add a step; ``follows``: it began when the one before ended."""
        if not follows:
            self.steps.clear()
        self.steps.append(step)
        tasks = max(1, sum(map(len, step.times)))
        while len(self.steps) > min(KEPT, max(FEWEST, KEPT_TASKS // tasks)):
            self.steps.popleft()

    def as_json(self) -> dict[str, Any]:
        """Return the schedule and the steps for timeline.json; times count from the start of the first step."""
        zero = min((float(t[:, 0].min()) for t in self.steps[0].times if len(t)), default=0.0)
        return {
            "schedule": to_text(self.schedule),
            "steps": [
                {
                    "step": step.number,
                    "devices": [np.round(t - zero, 7).tolist() for t in step.times],
                    **asdict(step.waits),
                }
                for step in self.steps
            ],
        }


def recorded_from_json(value: Any, where: str) -> RecordedSteps:
    """Read what ``as_json`` wrote.

    Raises:
        SpecError: it is something else.
    """
    try:
        schedule = from_text(value["schedule"], where)
        result = RecordedSteps(schedule)
        for one in value["steps"]:
            times = tuple(np.array(rows, dtype=float).reshape(-1, 2) for rows in one["devices"])
            if [len(t) for t in times] != list(map(len, schedule.orders)):
                raise ValueError("a step has other tasks than its schedule")
            if not all(np.isfinite(t).all() for t in times):
                raise ValueError("a time is not finite")
            waits = _WAITS.validate_python({key: value for key, value in one.items() if key.endswith("_s")})
            for own in (waits.data_s, waits.sums_s):
                if own and len(own) != schedule.devices:
                    raise ValueError(f"{len(own)} values for {schedule.devices} devices")
            result.steps.append(RecordedStep(int(one["step"]), times, waits))
        if not result.steps:
            raise ValueError("there are no steps")
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise SpecError(where, f"its recorded steps can't be read ({error})", "look at another run") from None
    return result
