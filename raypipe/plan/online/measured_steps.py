"""Turn the task times that devices report into step times, bubble ratios, Timelines and a prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.online.calibrate import fit_costs
from raypipe.plan.online.recorded_steps import NO_WAITS, RecordedStep, RecordedSteps, StepWaits
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import COMPUTE
from raypipe.schedule.lowering.asynchronous import WHOLE, Part, parts
from raypipe.schedule.walk import walk
from raypipe.simulate.engine import simulate
from raypipe.simulate.series import steady
from raypipe.simulate.timeline import Span, Timeline

WARM_UP, CALIBRATION = 2, 8
"""Steps of an attempt that are skipped while allocators warm up, then steps whose task times are averaged."""


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """The prediction of later steps, made from the calibration steps."""

    costs: CostTable
    """Measured costs, in seconds."""
    timeline: Timeline
    step_s: float
    bubble_ratio: float


class StepClock:
    """Turns task times of devices into step times; it keeps the calibration steps and the newest ones."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.recorded: RecordedSteps | None = None
        """The newest steps that followed one another; None before the first. Of an asynchronous schedule, those between
        its fill and its drain."""
        self._steady = False
        self.prediction: StepPrediction | None = None
        self._parts = parts(schedule)
        self._compute = {
            part: [np.array([t.kind in COMPUTE for t in order], dtype=bool) for order in one.orders]
            for part, one in self._parts.items()
        }
        self._previous_end: float | None = None
        self._early: list[Timeline] = []
        self._calibration: list[Timeline] = []
        self._gaps: list[float] = []
        self._seen = 0

    def pause(self) -> None:
        """Call when devices did something else between steps: the next step then starts with its first task."""
        self._previous_end = None

    def add(
        self, part: Part, times: list[NDArray[np.float64]], waits: StepWaits = NO_WAITS, number: int = 0
    ) -> tuple[float, float]:
        """Add one step and return its seconds and bubble ratio.

        Args:
            part: which part of the schedule ran.
            times: per device, an array of (start, end) in seconds, of shape (tasks, 2).
            waits: what devices waited for in their tasks.
            number: of the step in the run.

        Returns:
            Seconds from the end of the previous step to the end of this one, and the share of them that devices idled.
        """
        start = min(float(t[0, 0]) for t in times if len(t))
        end = max(float(t[:, 1].max()) for t in times if len(t))
        # Clocks of several hosts differ a little, but a step never takes negative time.
        follows = self._previous_end is not None and self._previous_end < end
        begin = self._previous_end if self._previous_end is not None and follows else start
        self._previous_end = end
        step_s = end - begin
        busy = sum(float((t[c, 1] - t[c, 0]).sum()) for t, c in zip(times, self._compute[part], strict=True))
        self._seen += 1
        if self.prediction is None:
            warm = self._seen > WARM_UP
            (self._calibration if warm else self._early).append(self.timeline(part, times, start))
            if follows and warm:
                self._gaps.append(start - begin)
        self._latest = (part, times, start)
        self._record(part, RecordedStep(number, tuple(times), waits), follows)
        return step_s, 1.0 - busy / (len(times) * step_s)

    def _record(self, part: Part, step: RecordedStep, follows: bool) -> None:
        if part != (WHOLE if self.schedule.versions == "flush" else (False, False)):
            self._steady = False  # an asynchronous schedule fills or drains
            return
        if self.recorded is None:
            self.recorded = RecordedSteps(as_run(self._parts[part]))
        self.recorded.add(step, follows and self._steady)
        self._steady = True

    def timeline(self, part: Part, times: list[NDArray[np.float64]], start: float) -> Timeline:
        """Convert a measured step to a Timeline that begins with its first task."""
        schedule = self._parts[part]
        return Timeline(
            schedule,
            tuple(
                tuple(Span(task, float(a) - start, float(b) - start) for task, (a, b) in zip(order, t, strict=True))
                for order, t in zip(schedule.orders, times, strict=True)
            ),
        )

    def measured(self) -> Timeline | None:
        """Return the Timeline of the newest step, if there is one."""
        return self.timeline(*self._latest) if self._seen else None

    def so_far(self) -> CostTable:
        """Fit costs to the steps measured so far, without the very first one if there are others."""
        return fit_costs((self._early + self._calibration)[1:] or self._early)

    def predict(self, at_end: bool = False) -> StepPrediction | None:
        """Return the prediction once, as soon as enough steps have been measured; None before and after.

        With ``at_end``, any number of measured steps is enough.
        """
        if self.prediction is not None or (len(self._calibration) < CALIBRATION and not at_end):
            return None
        steps = self._calibration or self._early
        if not steps:
            return None
        costs = fit_costs(steps)
        timeline = simulate(as_run(self.schedule), costs)
        if self.schedule.versions == "flush":
            # Simulate each calibration step with its own task times: the critical path through varying times is longer
            # than the one through their means. Then add the gap between the steps' calls on a device.
            makespans = [retimed(one, costs) for one in steps]
            step_s = fmean(makespans) + (median(self._gaps) if self._gaps else 0.0)
        else:
            step_s = steady(self.schedule, costs)
        step_s = max(step_s, *timeline.busy)  # where clocks disagree, a measured gap may be far below zero
        busy = sum(timeline.busy)
        self.prediction = StepPrediction(costs, timeline, step_s, 1.0 - busy / (self.schedule.devices * step_s))
        self._calibration.clear()
        self._early.clear()
        return self.prediction


def as_run(schedule: Schedule) -> Schedule:
    """Return the schedule with the dependency rules that devices follow.

    A runner never makes an R wait for the incoming gradient, because its device has nothing else to do meanwhile. The
    halves of a pair are measured one after another, also where they took turns: each has the time of its turns.
    """
    return replace(schedule.unpaired(), rules=replace(schedule.rules, recompute="early"))


def retimed(measured: Timeline, costs: CostTable) -> float:
    """Return the makespan of a measured step's task times when tasks wait for nothing but their dependencies.

    All-reduces take their mean time from ``costs``, because their measured times include waiting for other devices.
    """
    graph = link(as_run(measured.schedule))
    typical_times = costs.durations(measured.schedule, graph.tasks)
    spans = [span for device in measured.spans for span in device]
    durations = [typical_times[i] if task.kind == "AR" else end - start for i, (task, start, end) in enumerate(spans)]
    return max(walk(graph, durations, costs.comm).end)
