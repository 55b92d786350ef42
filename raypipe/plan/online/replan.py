"""Replan a running job from measured costs: swap to a faster plan, and swap back if it is not faster in fact.

A plan is made from predicted or profiled costs; the running job measures the real ones. Once enough steps have been
measured, a thread plans again everything that can change between two steps (``better_plan``). The driver swaps the
programs without restarting an actor. When enough steps of the new plan have run, their median is compared with that of
the steps before. A swap that made steps slower is reverted, and the old plan is timed again: if the machine has become
slower in the meantime, the swap is restored. Replanning starts again when step times drift, and also at growing
intervals, because costs can change without a visible change of the step time.
Every decision is logged as an event with its prediction, its outcome and its reason.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

from raypipe.plan.online.better_order import Running, Swap, better_plan, key
from raypipe.plan.online.controller import Controller, Event, MeasuredStep
from raypipe.plan.plan import Plan
from raypipe.schedule.costs import CostTable

THRESHOLD = 0.01
"""Smallest predicted gain for which a swap is tried."""
WATCHED = 10
"""Steps before and after a swap whose medians are compared."""
UNSURE = 4
"""While the gain is within its noise, up to this many times ``WATCHED`` steps are compared."""
SWAPS = 3
"""Swaps tried in a row before the plan is settled."""
DRIFT = 0.1
"""Relative change of the median step time from which the costs count as changed."""
QUIET = 50
"""Steps of a settled plan after which it is measured again even without a drift; doubles each time."""
CALM = 2 * WATCHED
"""Steps of a settled plan before a drift is acted on; doubles with each drift up to ``CALMEST``."""
CALMEST = 640
NICENESS = 10
"""Nice value of the search thread, so that stages on the same host run first."""

State = Literal["measuring", "searching", "watching", "returning", "settled"]
KINDS = ("F", "B", "W", "R", "AR", "U", "message")


class Replanner(Controller):
    """Replans a running job, as long as it goes on: costs may change.

    It measures no memory: no plan that it offers holds more activations than the first one.
    """

    def __init__(self, present: Running, batch: int, clips: bool) -> None:
        super().__init__()
        self.present, self.batch, self.clips = present, batch, clips
        self.state: State = "measuring"
        self._next: Running | None = None
        """The plan to swap to before the next step."""
        self._swap: Swap | None = None
        """The swap whose steps are being timed."""
        self._before: Running | None = None
        """The plan before that swap."""
        self._measured: Sequence[float] = ()
        """Step times, in seconds, of the plan that ran when the search began."""
        self._lost: tuple[Swap, float] | None = None
        """A swap that was reverted, and its median step time."""
        self._tried: set[str] = set()
        """Keys of the plans that were slower than another."""
        self._costs: CostTable | None = None
        """The newest measured costs of the current plan."""
        self._planned_on: CostTable | None = None
        """The costs of the last search."""
        self._steps: list[float] = []
        """Step times of the current plan since the last change of state."""
        self._settled_for = 0
        """Steps since the plan was settled."""
        self._left, self._quiet, self._calm = SWAPS, QUIET, CALM
        self._thread: threading.Thread | None = None
        self._found: Swap | BaseException | None = None

    @property
    def proven(self) -> Plan:
        """The plan that a restart begins with; while a swap is being timed, the plan before it."""
        trying = self.state in ("watching", "returning") and self._before is not None
        return self._before.plan if trying and self._before is not None else self.present.plan

    def observe(self, measured: MeasuredStep) -> None:
        """Record one finished step of the current plan; start a search once costs have been measured."""
        costs = measured.costs
        self._costs = costs or self._costs
        self._steps.append(measured.step_s)
        if self.state == "measuring" and costs is not None:
            self._search(costs)
        elif self.state == "watching" and len(self._steps) > WATCHED:  # the first step loaded the programs
            self._judge(self._swap, self._before)
        elif self.state == "returning" and len(self._steps) > WATCHED:
            self._judge_again()
        elif self.state == "settled":
            self._look_again()

    def next_plan(self) -> Running | None:
        """Return the plan to run from the next step on; None to keep the current one."""
        if self.state == "searching" and self._thread is not None and not self._thread.is_alive():
            self._thread = None
            self._decide()
        target, self._next = self._next, None
        if target is not None:
            self.present = target
            self._steps.clear()
            self._costs = None
        return target

    def _search(self, costs: CostTable) -> None:
        """Start a search in a thread beside the step loop."""
        if self._planned_on is not None:
            kind, stage, ratio = largest_change(self._planned_on, costs)
            self._report("refitted", task=kind, stage=stage, ratio=ratio)
        self._planned_on = costs
        self._measured = self._steps[-WATCHED:]
        self.state = "searching"
        self._thread = threading.Thread(target=self._work, args=(costs,), name="raypipe-replan", daemon=True)
        self._thread.start()

    def _work(self, costs: CostTable) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._found = better_plan(self.present, self.batch, self.clips, costs, self._tried)
        except Exception as error:
            self._found = error

    def _decide(self) -> None:
        result, self._found = self._found, None
        if not isinstance(result, Swap):
            self._report("kept", gain=0.0, reason=f"replanning failed: {result}")
            self._settle()
            return
        measured = Times.of(self._measured)
        times = {"measured_s": measured.middle, "current_s": result.current_s, "predicted_s": result.predicted_s}
        least = max(THRESHOLD, measured.doubt)
        if result.gain < least:
            reason = "no plan is predicted to be faster"
            if result.gain > 0:
                reason = f"{result.change}: its predicted gain is below {least:.1%}, the least for a swap"
            self._report("kept", gain=result.gain, reason=reason, **times)
            self._settle()
        else:
            self._report("replanned", change=result.change, gain=result.gain, **times)
            self._swap, self._before, self._next, self.state = result, self.present, result.target, "watching"

    def _judge(self, swap: Swap | None, before: Running | None) -> None:
        """Compare the steps since the swap with those before it, and keep or revert it."""
        assert swap is not None
        assert before is not None
        was, now = Times.of(self._measured), Times.of(self._steps[1:])
        gain = 1.0 - now.middle / was.middle
        if abs(gain) < 2.0 * math.hypot(was.doubt, now.doubt) and len(self._steps) <= UNSURE * WATCHED:
            return  # undecided: wait for more steps
        self._report(
            "realised",
            change=swap.change,
            gain=gain,
            predicted_gain=swap.gain,
            before_s=was.middle,
            after_s=now.middle,
            steps=now.number,
        )
        self._left -= 1
        if gain < 0:
            self._report("reverted", change=swap.change)
            self._tried.add(key(swap.target.plan))
            self._lost, self._next, self.state = (swap, now.middle), before, "returning"
        else:
            self._tried.add(key(before.plan))
            self._go_on()

    def _judge_again(self) -> None:
        """Compare the old plan, timed again after a reverted swap, with the swap; restore the swap if it was faster."""
        assert self._lost is not None
        (swap, rival_s), now = self._lost, Times.of(self._steps[1:])
        self._lost = None
        gain = 1.0 - rival_s / now.middle
        if gain >= max(THRESHOLD, 2.0 * now.doubt):
            self._report("restored", change=swap.change, gain=gain, before_s=now.middle, after_s=rival_s)
            self._tried.discard(key(swap.target.plan))
            self._tried.add(key(self.present.plan))
            self._next = swap.target
            self._settle()
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Search again with the costs just measured, or settle after ``SWAPS`` swaps."""
        if self._left > 0 and self._costs is not None:
            self._search(self._costs)
        else:
            self._settle()

    def _settle(self) -> None:
        self.state = "settled"
        self._settled_for = 0
        self._steps.clear()

    def _look_again(self) -> None:
        """Measure the costs again when step times have drifted since the plan was settled, or after ``QUIET`` steps."""
        self._settled_for += 1
        if self._settled_for >= self._calm and len(self._steps) >= 2 * WATCHED:
            was, now = Times.of(self._steps[:WATCHED]), Times.of(self._steps[-WATCHED:])
            change = now.middle / was.middle - 1.0
            if abs(change) > max(DRIFT, 3.0 * math.hypot(was.doubt, now.doubt)):
                self._report("drifted", was_s=was.middle, now_s=now.middle)
                self._tried.clear()
                self._calm = min(2 * self._calm, CALMEST)
                self._measure()
                return
            del self._steps[WATCHED:-WATCHED]
        if self._settled_for >= self._quiet:
            self._quiet *= 2
            self._measure()

    def _measure(self) -> None:
        self._next, self.state, self._left = self.present, "measuring", SWAPS  # the same plan, measured anew

    def _report(self, event: str, **fields: Any) -> None:
        self._events.append(Event(event, fields))


class Times(NamedTuple):
    """Statistics of the step times of one plan."""

    middle: float
    """Median, in seconds."""
    doubt: float
    """Relative standard error of the median, estimated from the median absolute deviation of normal step times."""
    number: int
    """Number of steps."""

    @staticmethod
    def of(steps: Sequence[float]) -> Times:
        """Compute the statistics of at least one step.

        >>> Times.of([1.0, 1.0, 1.0, 5.0])
        Times(middle=1.0, doubt=0.0, number=4)
        """
        middle = median(steps)
        spread = 1.4826 * median(abs(s - middle) for s in steps)
        return Times(middle, 1.2533 * spread / math.sqrt(len(steps)) / middle if middle else 0.0, len(steps))


def largest_change(was: CostTable, now: CostTable) -> tuple[str, int, float]:
    """Return the (kind, stage, ratio) whose time has changed most, in seconds.

    The kind may be ``message``; the stage is then the one before the link. Times below 5 % of the longest task are
    ignored.

    >>> largest_change(CostTable.even(2), CostTable.even(2, forward=3.0))
    ('F', 0, 3.0)
    """

    def times(costs: CostTable, kind: str) -> tuple[float, ...]:
        return costs.links[:-1] if kind == "message" else costs.by_kind(kind)

    matters = 0.05 * max(max(was.by_kind(kind)) for kind in KINDS[:-1])
    result, most = ("F", 0, 1.0), 0.0
    for kind in KINDS:
        for stage, (a, b) in enumerate(zip(times(was, kind), times(now, kind), strict=True)):
            if min(a, b) > 0 and max(a, b) >= matters and abs(b - a) > most:
                result, most = (kind, stage, b / a), abs(b - a)
    return result
