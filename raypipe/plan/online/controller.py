"""The interface between the driver and the online controllers, which change the plan of a running job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.schedule.costs import CostTable

if TYPE_CHECKING:  # workers, which report to it, start without the planner
    from raypipe.plan.online.better_order import Running
    from raypipe.plan.online.measured_steps import StepClock
    from raypipe.plan.plan import Plan


class StepMemory(NamedTuple):
    """A device's measured memory in a step, in bytes; only when asked to, since it slows steps on CPUs."""

    peak: int
    """Allocated at its fullest moment."""
    recomputed: dict[int, int]
    """Per stage with an R, what one micro-batch's R left allocated."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The measurements of one finished step of the current plan."""

    step_s: float
    """Seconds from the end of the previous step to the end of this one."""
    memory: Sequence[StepMemory]
    """Memory measurements, one per device."""
    clock: StepClock
    """The clock that timed this plan's steps, this one included."""
    costs: CostTable | None = None
    """Measured costs in seconds; set once per clock, with the step after which enough steps were measured."""
    expert_loads: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    """Tokens of each expert, over all copies, by layer in the model's order; none where experts are not divided."""


class Event(NamedTuple):
    """A line for ``events.jsonl``."""

    name: str
    fields: dict[str, Any]


class Controller(ABC):
    """Changes the plan of a running job. The driver reports every finished step to it and asks it before every step."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    @abstractmethod
    def observe(self, measured: MeasuredStep) -> None:
        """Record one finished step. Steps that were queued before the plan changed are not reported."""

    @abstractmethod
    def next_plan(self) -> Running | None:
        """Return the plan to run from the next step on; None to keep the current one.

        Returning the current schedule (the same object) only restarts its measurement.
        """

    @property
    @abstractmethod
    def proven(self) -> Plan:
        """The plan that a restart begins with: the newest one that has been seen to work."""

    @property
    def measures_memory(self) -> bool:
        """Return whether workers measure their memory in every step."""
        return False

    @property
    def done(self) -> bool:
        """Return whether the controller has offered its last plan."""
        return False

    def drain(self) -> list[Event]:
        """Return and clear the events since the last call, oldest first."""
        events, self._events = self._events, []
        return events
