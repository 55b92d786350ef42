"""The measured steps that an explanation is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raypipe.plan.online.recorded_steps import RecordedStep
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import COMPUTE, Kind
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.simulate.timeline import Span, Timeline

WORK = frozenset(COMPUTE - {"R"} | {"U"})
"""Kinds of task that a step cannot do without: recomputation repeats work, and the rest moves data."""
TaskTimes = Mapping[tuple[Kind, int], float]
"""(kind, stage) -> time of a task with one micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Consecutive steps of one schedule, and what their tasks should take."""

    schedule: Schedule
    """As devices run it (``plan.online.measured_steps.as_run``)."""
    steps: tuple[RecordedStep, ...]
    """At least one. Of several, the first only leads in: the step time is that of the others."""
    norm: NormPolicy = "none"
    """What updates did about the global gradient norm."""
    planned: TaskTimes = field(default_factory=dict)
    """What the profile says of each stage's tasks; only their proportions count."""
    earlier: TaskTimes = field(default_factory=dict)
    """What the same run's first steps took."""

    def timeline(self, step: RecordedStep) -> Timeline:
        """Return one of the steps, from when its first task began."""
        zero = min(float(t[:, 0].min()) for t in step.times if len(t))
        rows = zip(self.schedule.orders, step.times, strict=True)
        spans = (
            (Span(task, float(a) - zero, float(b) - zero) for task, (a, b) in zip(order, times, strict=True))
            for order, times in rows
        )
        return Timeline(self.schedule, tuple(tuple(sorted(row, key=lambda span: span.start)) for row in spans))


def task_times(schedule: Schedule, costs: CostTable) -> dict[tuple[Kind, int], float]:
    """Return the time of each kind of task on each stage that a cost table says, for one full micro-batch."""
    one = {(t.kind, t.stage): t._replace(mbs=t.mbs[:1]) for t in schedule.tasks() if t.kind in COMPUTE}
    return dict(zip(one, costs.durations(schedule, list(one.values())), strict=True))
