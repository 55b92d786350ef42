"""The closed loop: search for a better order on the costs that a running job measures, and say what it gained.

ZeroPP section 4 times the schedule it has, moves tasks, and repeats; here the whole search runs again on the measured
times, beginning from the order that is running. It works beside the step loop; the driver swaps the programs between
two steps, without restarting an actor. Losses stay what they are: a synchronous order changes no result.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace
from statistics import median

from raypipe.auto import search
from raypipe.plan.plan import Plan, build_schedule
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.text import from_text, to_text
from raypipe.simulate.engine import simulate

THRESHOLD = 0.01
"""Predicted gain from which a swap is worth its while."""
BUDGET_S = 3.0
"""Seconds of search; it shares the driver's processor time."""
WATCHED = 10
"""Steps before and after a swap whose medians are compared."""


@dataclass(frozen=True, slots=True)
class Swap:
    """A better plan, and by how much."""

    plan: Plan
    schedule: Schedule
    current_s: float
    """Makespan of the running order under the measured costs, simulated."""
    predicted_s: float
    """The same of the new one."""

    @property
    def gain(self) -> float:
        """Predicted share of the step that is saved."""
        return 1.0 - self.predicted_s / self.current_s


class Replanner:
    """One search on measured costs for a plan whose order was searched in the first place."""

    def __init__(self, plan: Plan, batch: int) -> None:
        self.plan, self.batch = plan, batch
        self._found: Swap | None = None
        self._thread: threading.Thread | None = None
        self._before: deque[float] = deque(maxlen=WATCHED)
        self._after: list[float] = []

    def start(self, costs: CostTable) -> None:
        """Begin to search beside the step loop."""
        self._thread = threading.Thread(target=self._search, args=(costs,), name="raypipe-replan", daemon=True)
        self._thread.start()

    def _search(self, costs: CostTable) -> None:
        self._found = better_plan(self.plan, self.batch, costs)

    def take(self) -> Swap | None:
        """The better plan, once, when the search is over and found one worth the swap."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        found, self._found = self._found, None
        return found if found is not None and found.gain >= THRESHOLD else None

    def watch(self, step_s: float, swapped: bool) -> float | None:
        """Count a measured step; returns the realised gain, once, when enough steps followed the swap."""
        if not swapped:
            self._before.append(step_s)
            return None
        self._after.append(step_s)
        if len(self._after) != WATCHED or not self._before:
            return None
        return 1.0 - median(self._after) / median(self._before)


def better_plan(plan: Plan, batch: int, costs: CostTable) -> Swap:
    """Search on measured costs from the plan's own order; the result may be that order again (gain 0).

    Raises:
        ScheduleError: the plan has no order of its own, or costs for another number of stages.
    """
    current = from_text(plan.order or "", "plan: order")
    found = search(
        current.placement, current.microbatches, costs, memory_limit=plan.parallel.memory_limit, budget_s=BUDGET_S,
        starts=[current],
    )  # fmt: skip
    new = plan.model_copy(update={"order": to_text(replace(found.schedule, name=current.name))})
    schedule = build_schedule(new, batch)
    now = simulate(build_schedule(plan, batch), costs).makespan
    return Swap(new, schedule, current_s=now, predicted_s=simulate(schedule, costs).makespan)
