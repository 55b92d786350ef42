"""Run the online controllers one after another: each begins with the plan on which the one before it settled.

The search for the share of layers to keep runs first, because it changes both memory and task times; replanning
follows. No error in a controller or in the prediction can end training.

The share of layers that keep their activations rises while every device stays under its memory cap. Merak raises the
first stage's share until the device runs out of memory. Here no device does: devices measure their peak memory and what
a recomputed micro-batch allocates, which predicts the memory of a larger share before it is tried. If a share turns out
to need more than the cap, it is given up between two steps. Losses stay bitwise the same.

Source: Lai et al. 2022 (Merak), section 5.2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ParamSpec, TypeVar

from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.requested_schedule import alphas, recomputed_after
from raypipe.plan.online.better_order import Running, running_of, runs_ahead, step_seconds
from raypipe.plan.online.controller import Controller, Event, MeasuredStep, StepMemory
from raypipe.plan.online.measured_steps import StepClock
from raypipe.plan.online.replan import Replanner
from raypipe.plan.online.stragglers import Stragglers
from raypipe.plan.online.uneven_experts import UnevenExperts
from raypipe.plan.plan import Plan, build_schedule
from raypipe.schedule.costs import CostTable
from raypipe.schedule.live_activations import in_flight

WATCHED = 2
"""Steps measured per share; the first step after a change is skipped."""


def raises(parallel: ParallelSpec) -> bool:
    """Return whether the run searches for the share itself."""
    return parallel.recompute == "stage-aware" and parallel.alphas is None


class Raiser(Controller):
    """Searches for the largest share of layers to keep."""

    def __init__(self, plan: Plan, batch: int, clips: bool) -> None:
        super().__init__()
        assert plan.parallel.memory_cap_mb is not None, "checked with the job"
        self.batch, self.clips = batch, clips
        self.plan, self.cap = plan, plan.parallel.memory_cap_mb * 2**20
        self.levels = levels(plan.cut)
        self.schedule = build_schedule(self._plan(0), batch)
        self.flight = in_flight(self.schedule)
        self.at = self.good = 0
        """Indices into ``levels``: the current share, and the largest share known to fit."""
        self.bad = len(self.levels)
        """The smallest share known not to fit."""
        self._found = False
        """Whether the search is over: the next plan is the last one."""
        self._next: tuple[int, Event] | None = None
        """The next share, possibly the current one without measuring, and the event to log with it."""
        self._seen: list[Sequence[StepMemory]] = []
        self._steps: list[float] = []
        self._promised: tuple[float, float] | None = None
        """Predicted gain of the change to the current share, and the step time in seconds before it."""
        self._layer_bytes: dict[int, float] = {}
        """Per stage, the bytes that one layer's activations of one micro-batch take."""

    def _plan(self, level: int) -> Plan:
        return self.plan.remade(self.batch, alphas=self.levels[level], memory_cap_mb=None)

    @property
    def proven(self) -> Plan:
        """The plan with the largest share that is known to fit; a restart begins with it."""
        return self._plan(self.good)

    @property
    def measures_memory(self) -> bool:
        """Workers measure memory until the share is found."""
        return not self._found

    @property
    def done(self) -> bool:
        """Return whether the share is found and its plan was returned."""
        return self._found and self._next is None

    def next_plan(self) -> Running | None:
        """Return the plan with the next share; None to keep the current plan. The last plan may keep its share."""
        if self._next is None:
            return None
        (self.at, event), self._next = self._next, None
        self._events.append(event)
        self._seen.clear()
        self._steps.clear()
        return running_of(self._plan(self.at), self.batch, self.clips)

    def observe(self, measured: MeasuredStep) -> None:
        """Record one finished step; after enough of them, decide on the next share."""
        if self._found or self._next is not None:
            return
        devices = measured.memory
        self._seen.append(devices)
        self._steps.append(measured.step_s)
        if len(self._seen) <= WATCHED:
            return
        peaks = [max(step[d].peak for step in self._seen[1:]) for d in range(len(devices))]
        for one in devices:
            for stage, size in one.recomputed.items():
                recomputed = sum(i in self._recompute(self.at) for i in self.plan.cut[stage])
                self._layer_bytes[stage] = max(self._layer_bytes.get(stage, 0.0), size / recomputed)
        fits = max(peaks) <= self.cap
        if fits:
            self.good = max(self.good, self.at)
        else:
            self.bad = min(self.bad, self.at)
        candidates = [k for k in range(self.good + 1, self.bad) if max(self._expected(peaks, k)) <= self.cap]
        chosen = max(candidates, default=self.good)
        now_s = min(self._steps[1:])  # the minimum, since one disturbed step would dominate a mean of so few
        fields = {
            "alpha": self.levels[self.at],
            "peak_mb": max(peaks) / 2**20,
            "fits": fits,
            "next": self.levels[chosen],
            "expected_mb": max(self._expected(peaks, chosen)) / 2**20,
            "step_s": now_s,
        }
        if self._promised is not None:
            fields |= {"predicted_gain": self._promised[0], "realised_gain": 1.0 - now_s / self._promised[1]}
        if chosen != self.at:
            self._promised = self._gain(measured.clock.so_far(), chosen), now_s
            fields |= {"next_gain": self._promised[0]}
        self._next = chosen, Event("recompute", fields)
        self._found = chosen == self.good

    def _gain(self, costs: CostTable, level: int) -> float:
        """Predict which fraction of the step time another level saves."""
        recomputed, then = self._recompute(self.at), self._recompute(level)
        recompute = []
        for stage, layers in enumerate(self.plan.cut):
            now = sum(i in recomputed for i in layers)
            recompute.append(costs.recompute[stage] * (sum(i in then for i in layers) / now if now else 0.0))

        def seconds(level: int, costs: CostTable) -> float:
            plan = self._plan(level)
            schedule = build_schedule(plan, self.batch)
            return step_seconds(schedule, costs, self.clips, runs_ahead(plan.parallel, self.clips, schedule, costs))

        return 1.0 - seconds(level, replace(costs, recompute=tuple(recompute))) / seconds(self.at, costs)

    def _recompute(self, level: int) -> frozenset[int]:
        return recomputed_after(self.plan.cut, alphas(len(self.plan.cut), self.levels[level]))

    def _expected(self, peaks: Sequence[float], level: int) -> list[float]:
        """Predict each device's peak memory in bytes at another level from the peaks at the current one.

        A micro-batch in its backward has all its activations anyway; each other one in flight keeps more layers.
        """
        now, then = self._recompute(self.at), self._recompute(level)
        result = list(peaks)
        for (stage, device), count in self.flight.items():
            more = sum((i in now) - (i in then) for i in self.plan.cut[stage])
            result[device] += (count - 1) * more * self._layer_bytes.get(stage, 0.0)
        return result


def levels(cut: Sequence[Sequence[int]]) -> list[float]:
    """Return the first stage's shares, ascending from 0, at which some stage keeps one more layer."""
    stages = len(cut)
    shares = {0.0}
    for i, layers in enumerate(cut[: max(1, stages - 2)], 1):
        scale = (stages - i) / max(1, stages - 1) if stages > 1 else 1.0
        shares |= {min(1.0, k / len(layers) * scale + 1e-9) for k in range(1, len(layers) + 1)}
    result: list[float] = []
    before: frozenset[int] | None = None
    for share in sorted(shares):
        recomputed = recomputed_after(cut, alphas(stages, share))
        if recomputed != before:
            result.append(share)
            before = recomputed
    return result


P = ParamSpec("P")
T = TypeVar("T")


class Guard:
    """Runs what only looks at training (prediction, calibration, planning again) and must not end it.

    Where that fails, it reports so once and leaves it out from then on.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._left_out: set[str] = set()

    def __call__(self, what: str, look: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return what ``look(...)`` returns; None where ``what`` has failed, now or before."""
        if what in self._left_out:
            return None
        try:
            return look(*args, **kwargs)
        except Exception as error:
            self._left_out.add(what)
            why = (str(error).splitlines() or [""])[0]
            self._tell(f"{what} failed and is disabled from now on; training goes on: {type(error).__name__}: {why}")
            return None


class ControllerSequence:
    """The Controller that the driver uses. Once per clock, it also predicts the time of later steps; and it names
    devices that turn slow, and uneven loads of experts that another order of them would even out.

    Args:
        present: the plan that runs first.
        batch: ``train.batch``.
        clips: whether gradients are clipped by their global norm.
        report: called with one line when a part fails and is disabled.
        slow: devices that were slow before, and how many times as long as they should their tasks take.
    """

    def __init__(
        self,
        present: Running,
        batch: int,
        clips: bool,
        report: Callable[[str], None],
        slow: Mapping[int, float] | None = None,
    ) -> None:
        self.proven: Plan = present.plan
        """The plan that a restart begins with."""
        self.measures_memory = False
        """Whether workers measure their memory in every step."""
        self._guard = Guard(report)
        self._present = present
        made_for = present.plan.made_for
        self._stragglers = Stragglers(slow, alike=made_for is None or not made_for.kinds)
        self._uneven = UnevenExperts(present.plan.parallel.experts, present.plan.parallel.expert_order)
        self._events: list[Event] = []
        self._name = ""
        self._active: Controller | None = None
        self._following: deque[tuple[str, Callable[[Running], Controller]]] = deque()
        if raises(present.plan.parallel):
            self._following.append(("the search for parallel.alphas", lambda now: Raiser(now.plan, batch, clips)))
        if present.plan.parallel.replans:
            self._following.append(("replanning", lambda now: Replanner(now, batch, clips)))
        self._begin_next()

    @property
    def done(self) -> bool:
        """Return whether the plan stays as it is from now on."""
        return self._active is None

    def observe(self, measured: MeasuredStep) -> None:
        """Report one finished step to the active controller, with measured costs if a prediction was just made."""
        costs = self._predict(measured.clock)
        if self._present.plan.parallel.experts == 1:  # devices wait inside tasks for the one with the busiest expert
            self._events += self._guard("naming slow devices", self._stragglers.observe, measured.clock) or []
        else:
            self._events += self._guard("adding up loads", self._uneven.observe, measured.expert_loads) or []
        step = measured if costs is None else replace(measured, costs=costs)
        self._ask(lambda active: active.observe(step))

    def next_plan(self) -> Running | None:
        """Return the plan to run from the next step on; None to keep the current one."""
        answer = self._ask(lambda active: (active.next_plan(), active.done))
        if answer is None:
            return None
        target, done = answer
        self._present = target or self._present
        if done:
            self._begin_next()
        return target

    def finish(self, clock: StepClock) -> None:
        """Call after the last step: makes the prediction of a run too short to have made it before."""
        self._predict(clock, at_end=True)

    def drain(self) -> list[Event]:
        """Return and clear the events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def _begin_next(self) -> None:
        self._active, self.measures_memory = None, False
        if self._following:
            self._name, start = self._following.popleft()
            self._active = self._guard(self._name, start, self._present)
            self._ask(lambda active: None)

    def _ask(self, question: Callable[[Controller], T]) -> T | None:
        """Return the active controller's answer; None if there is no controller or if it fails or has failed.

        After a failure, ``proven`` and ``measures_memory`` keep the controller's last values.
        """
        active = self._active
        if active is None:
            return None

        def answer() -> T:
            result = question(active)
            self._events += active.drain()
            self.proven, self.measures_memory = active.proven, active.measures_memory
            return result

        return self._guard(self._name, answer)

    def _predict(self, clock: StepClock, at_end: bool = False) -> CostTable | None:
        """Predict if the clock can now; return the measured costs behind the prediction and log an event."""
        if self._present.plan.parallel.late_updates:  # forwards wait for updates: simulated, both would count
            return None
        prediction = self._guard("the prediction", clock.predict, at_end)
        if prediction is None:
            return None
        fields = {"step_s": prediction.step_s, "bubble_ratio": prediction.bubble_ratio}
        self._events.append(Event("predicted", fields))
        return prediction.costs
