"""What the driver and everything that changes a running plan say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from raypipe.plan.online.better_order import Running
from raypipe.plan.online.measured_steps import StepClock
from raypipe.plan.plan import Plan
from raypipe.schedule.costs import CostTable


class StepMemory(NamedTuple):
    """What a device measures of its memory in a step, in bytes; only when asked to, since it slows steps on CPUs."""

    peak: int
    """Allocated at its fullest moment."""
    recomputed: dict[int, int]
    """Per stage with an R, what one micro-batch's R left allocated."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What one finished step of the present plan has measured."""

    step_s: float
    """Seconds from the end of the step before to its own end."""
    memory: Sequence[StepMemory]
    """Per device."""
    clock: StepClock
    """Which has timed this plan's steps, this one included."""
    costs: CostTable | None = None
    """Costs in seconds to plan with; given once per clock, with the step after which enough steps were measured."""


class Event(NamedTuple):
    """A line for ``events.jsonl``."""

    name: str
    fields: dict[str, Any]


class Controller(Protocol):
    """Changes the plan of a running job. It is told of every finished step and asked before every new one."""

    def observe(self, measured: MeasuredStep) -> None:
        """Take note of one finished step; steps that were queued before the plan changed are not told."""

    def next_plan(self) -> Running | None:
        """What to run from the next step on; None to go on as before.

        The same schedule (the object) again means that only its measurement begins anew.
        """

    @property
    def proven(self) -> Plan:
        """What a restart begins with: nothing that has not been seen to work."""

    @property
    def measures_memory(self) -> bool:
        """Whether workers measure their memory in every step."""

    @property
    def done(self) -> bool:
        """Whether it has offered its last plan."""

    def drain(self) -> list[Event]:
        """What has happened since the last call, oldest first."""
