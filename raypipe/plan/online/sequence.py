"""The online controllers of a run, in sequence: each begins with the plan that the one before it has settled on.

The search for the share of layers to keep comes first, because it moves memory and task times alike; planning again
follows. Nothing that they or the prediction raise can end training.
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
        """What ``look(...)`` returns; None where ``what`` has failed, now or before."""
        if what in self._left_out:
            return None
        try:
            return look(*args, **kwargs)
        except Exception as error:
            self._left_out.add(what)
            why = (str(error).splitlines() or [""])[0]
            self._tell(f"{what} failed and is left out from now on; training goes on: {type(error).__name__}: {why}")
            return None


class ControllerSequence:
    """The Controller that the driver knows. It also predicts, once per clock, what later steps take.

    Args:
        present: what runs first.
        batch: ``train.batch``.
        clips: gradients are clipped by their global norm.
        tell: is told of each part that failed and is left out, once.
    """

    def __init__(self, present: Running, batch: int, clips: bool, tell: Callable[[str], None]) -> None:
        self.proven: Plan = present.plan
        """What a restart begins with."""
        self.measures_memory = False
        """Whether workers measure their memory in every step."""
        self._guard = Guard(tell)
        self._present = present
        self._events: list[Event] = []
        self._name = ""
        self._active: Controller | None = None
        self._following: deque[tuple[str, Callable[[Running], Controller]]] = deque()
        if raises(present.plan.parallel):
            self._following.append(("the search for parallel.alphas", lambda now: Raiser(now.plan, batch, clips)))
        if present.plan.parallel.replans:
            self._following.append(("planning again", lambda now: Replanner(now, batch, clips)))
        self._begin_next()

    @property
    def done(self) -> bool:
        """Whether the plan stays as it is from now on."""
        return self._active is None

    def observe(self, measured: MeasuredStep) -> None:
        """Pass one finished step on, with the costs that a prediction was made from just now."""
        prediction = self._predict(measured.clock)
        told = measured if prediction is None else replace(measured, costs=prediction)
        self._ask(lambda active: active.observe(told))

    def next_plan(self) -> Running | None:
        """What to run from the next step on; None to go on as before."""
        answer = self._ask(lambda active: (active.next_plan(), active.done))
        if answer is None:
            return None
        target, done = answer
        self._present = target or self._present
        if done:
            self._begin_next()
        return target

    def finish(self, clock: StepClock) -> None:
        """After the last step: predict from the few steps of a short run, if that was not done before."""
        self._predict(clock, at_end=True)

    def drain(self) -> list[Event]:
        """What has happened since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def _begin_next(self) -> None:
        self._active, self.measures_memory = None, False
        if self._following:
            self._name, start = self._following.popleft()
            self._active = self._guard(self._name, start, self._present)
            self._ask(lambda active: None)

    def _ask(self, question: Callable[[Controller], T]) -> T | None:
        """The active controller's answer; None if there is none, or if it failed, now or before.

        A controller that failed leaves behind what it said last of a restart's plan and of memory.
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
        """The costs of a prediction made just now; it leaves an event."""
        prediction = self._guard("the prediction", clock.predict, at_end)
        if prediction is None:
            return None
        fields = {"step_s": prediction.step_s, "bubble_ratio": prediction.bubble_ratio}
        self._events.append(Event("predicted", fields))
        return prediction.costs
