"""The closed loop: measure, fit, plan again, take up what promises more, and go back if it does not deliver.

A plan is made from costs that a model or a profile predicts; the running job measures them. Once enough steps have
been measured, everything that can change between two steps is planned again (``better_plan``) beside the step loop.
The driver swaps the programs, without restarting an actor; when enough steps have followed, their time is held
against that of the steps before: a swap that lost is undone and not tried again, one that gained is measured and
planned on. When steps become much slower or faster than they were, the costs have changed: it all begins again.
Every decision leaves an event with what was predicted and what came of it.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from raypipe.runtime.better_plan import Running, Swap, better_plan, key
from raypipe.schedule.costs import CostTable

THRESHOLD = 0.01
"""Predicted gain from which a swap is worth its while."""
WATCHED = 10
"""Steps before and after a swap whose medians are compared."""
SWAPS = 3
"""Tried in a row before the plan counts as settled."""
DRIFT = 0.1
"""Change of the median step from which the costs are no longer those that were planned with."""
QUIET = 50
"""Steps of a settled plan before anything is begun again; doubles each time."""
NICENESS = 10
"""Of the search: the stages' processors come first."""

State = Literal["measuring", "searching", "watching", "settled"]
KINDS = ("F", "B", "W", "R", "AR", "U")


@dataclass(frozen=True, slots=True)
class News:
    """Something to log."""

    event: str
    fields: dict[str, Any]


class Replanner:
    """Decides when to plan again and what becomes of it. The driver tells it of every step and asks it before each."""

    def __init__(self, present: Running, batch: int, clips: bool) -> None:
        self.present, self.batch, self.clips = present, batch, clips
        self.state: State = "measuring"
        self.news: list[News] = []
        """For the driver to log."""
        self._next: Running | None = None
        """To be taken up before the next step."""
        self._swap: Swap | None = None
        """Being watched."""
        self._before: Running | None = None
        """What ran before it."""
        self._before_s = 0.0
        self._tried: set[str] = set()
        """Plans that lost against another."""
        self._costs: CostTable | None = None
        """The newest ones."""
        self._planned_on: CostTable | None = None
        self._steps: list[float] = []
        """Of the present plan since the last change of state."""
        self._left, self._quiet = SWAPS, QUIET
        self._thread: threading.Thread | None = None
        self._found: Swap | BaseException | None = None

    def saw(self, step_s: float, costs: CostTable | None) -> None:
        """A step of the present plan was measured; ``costs`` if they could be fitted just now."""
        self._costs = costs or self._costs
        self._steps.append(step_s)
        if self.state == "measuring" and costs is not None:
            self._search(costs)
        elif self.state == "watching" and len(self._steps) > WATCHED:  # the first one took up the programs
            self._judge()
        elif self.state == "settled":
            self._look_for_drift()

    def take(self) -> Running | None:
        """What to run from the next step on, if it is not the same; asked before every step."""
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
        """Plan again, beside the step loop."""
        if self._planned_on is not None:
            kind, stage, ratio = largest_change(self._planned_on, costs)
            self._tell("refitted", task=kind, stage=stage, ratio=ratio)
        self._planned_on = costs
        self._before_s = median(self._steps[-WATCHED:])
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
        found, self._found = self._found, None
        if not isinstance(found, Swap):
            self._tell("kept", gain=0.0, reason=f"planning again failed: {found}")
            self._settle()
        elif found.gain < THRESHOLD:
            self._tell("kept", gain=found.gain, reason="nothing promises more")
            self._settle()
        else:
            self._tell(
                "replanned", change=found.change, gain=found.gain, current_s=found.current_s,
                predicted_s=found.predicted_s,
            )  # fmt: skip
            self._swap, self._before, self._next, self.state = found, self.present, found.target, "watching"

    def _judge(self) -> None:
        """Hold the steps since the swap against those before it."""
        assert self._swap is not None
        assert self._before is not None
        gain = 1.0 - median(self._steps[-WATCHED:]) / self._before_s
        self._tell("realised", gain=gain, predicted_gain=self._swap.gain)
        loser = self.present if gain < 0 else self._before
        self._tried.add(key(loser.plan))
        self._left -= 1
        if gain < 0:
            self._tell("reverted", change=self._swap.change)
            self._next = self._before
            self._settle()
        elif self._left and self._costs is not None:
            self._search(self._costs)
        else:
            self._settle()

    def _settle(self) -> None:
        self.state = "settled"
        self._steps.clear()

    def _look_for_drift(self) -> None:
        """Plan again when steps take another time than they took when the plan was settled."""
        if len(self._steps) < max(self._quiet, 2 * WATCHED):
            return
        was, now = median(self._steps[:WATCHED]), median(self._steps[-WATCHED:])
        if abs(now / was - 1.0) > DRIFT:
            self._tell("drifted", was_s=was, now_s=now)
            self._tried.clear()
            self._left, self._quiet = SWAPS, 2 * self._quiet
            self._next, self.state = self.present, "measuring"  # the same plan, measured anew
        else:
            del self._steps[WATCHED:-WATCHED]

    def _tell(self, event: str, **fields: Any) -> None:
        self.news.append(News(event, fields))


def largest_change(was: CostTable, now: CostTable) -> tuple[str, int, float]:
    """Kind of task, stage, and by which factor its time has changed the most; of times that matter.

    >>> largest_change(CostTable.even(2), CostTable.even(2, forward=3.0))
    ('F', 0, 3.0)
    """
    matters = 0.05 * max(max(was.by_kind(kind)) for kind in KINDS)
    found = ("F", 0, 1.0)
    for kind in KINDS:
        for stage, (a, b) in enumerate(zip(was.by_kind(kind), now.by_kind(kind), strict=True)):
            if min(a, b) > 0 and max(a, b) >= matters and abs(math.log(b / a)) > abs(math.log(found[2])):
                found = (kind, stage, b / a)
    return found
