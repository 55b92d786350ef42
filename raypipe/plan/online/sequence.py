"""Run the online controllers one after another: each begins with the plan on which the one before it settled.

The search for the share of layers to keep runs first, because it changes both memory and task times; replanning
follows. No error in a controller or in the prediction can end training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec, TypeVar

from raypipe.plan.online.better_order import Running
from raypipe.plan.online.controller import Controller, Event, MeasuredStep
from raypipe.plan.online.measured_steps import StepClock
from raypipe.plan.online.raise_kept_share import Raiser, raises
from raypipe.plan.online.replan import Replanner
from raypipe.plan.plan import Plan
from raypipe.schedule.costs import CostTable

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
    """The Controller that the driver uses. Once per clock, it also predicts the time of later steps.

    Args:
        present: the plan that runs first.
        batch: ``train.batch``.
        clips: whether gradients are clipped by their global norm.
        report: called with one line when a part fails and is disabled.
    """

    def __init__(self, present: Running, batch: int, clips: bool, report: Callable[[str], None]) -> None:
        self.proven: Plan = present.plan
        """The plan that a restart begins with."""
        self.measures_memory = False
        """Whether workers measure their memory in every step."""
        self._guard = Guard(report)
        self._present = present
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
            found = question(active)
            self._events += active.drain()
            self.proven, self.measures_memory = active.proven, active.measures_memory
            return found

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
