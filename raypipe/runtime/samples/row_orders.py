"""Search, for each step of packed documents, which of its unequal micro-batches goes first.

The driver does that while devices run the steps before. It knows the time of every row from the lengths of documents
alone, and sends with a step what differs from the data's own order. Programs do not change.
"""

from __future__ import annotations

import math
from pathlib import Path

from raypipe.data import known_fields, open_data, token_budget
from raypipe.data.packed import Packed
from raypipe.job.spec import JobSpec
from raypipe.models import build_model
from raypipe.plan.online.better_order import Running
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.microbatch_order import BUDGET_S, Order, OrderSearch

SHARE = 0.25
"""Of the time of a step, what the search for one may take at most; the driver shares processors with devices."""
REMEMBERED = 64
"""Steps whose orders are kept, more than are ever queued: one that is repeated for a replaced worker has the same."""


class RowOrders:
    """Orders of the micro-batches of a run's steps.

    Args:
        job: the job.
        data: folder of its prepared data.
    """

    def __init__(self, job: JobSpec, data: Path) -> None:
        self._job, self._data = job, data
        self._rows: Packed | None = None
        self._search: tuple[Schedule, OrderSearch] | None = None
        self._known: dict[int, Order | None] = {}

    def of(self, running: Running, steps: range, left_out: int, step_s: float | None) -> dict[int, Order]:
        """Return the orders of some steps, without those that are the data's own.

        Args:
            running: the plan and the schedule of these steps.
            steps: the steps, from 0.
            left_out: mini-batches of the training data that are not used.
            step_s: seconds of a step, if known.
        """
        # An asynchronous program runs micro-batches of the next step too, whose order is not known yet.
        if self._job.train.tokens_per_step is None or running.schedule.versions != "flush":
            return {}
        budget_s: float | None = BUDGET_S if step_s is None else min(BUDGET_S, SHARE * step_s)
        if self._job.train.deterministic:  # of gradients, not even the order of summing may depend on a clock
            budget_s = None
        for step in steps:
            if step not in self._known:
                times = self._times(running, step + left_out)
                self._known[step] = self._searched(running).best(times, step, budget_s)
        for old in [step for step in self._known if step < steps.start - REMEMBERED]:
            del self._known[old]
        return {step: order for step in steps if (order := self._known[step]) is not None}

    def forget(self) -> None:
        """Search again, because the run goes back and leaves out data, or has another plan."""
        self._known.clear()

    def _times(self, running: Running, at: int) -> list[float]:
        """Return the predicted time of each micro-batch of a mini-batch."""
        if self._rows is None:
            model = build_model(self._job, known_fields(self._data), 0, running.plan.parallel)
            budget = token_budget(self._job, running.plan.parallel.replicas, model)
            rows = open_data(self._data, model.task, budget=budget)
            assert isinstance(rows, Packed)
            self._rows = rows
        train, each = self._job.train, running.plan.parallel.microbatch
        times = self._rows.times("train", train.seed, at)
        return [math.fsum(times[i : i + each]) for i in range(0, len(times), each)]

    def _searched(self, running: Running) -> OrderSearch:
        if self._search is None or self._search[0] is not running.schedule:
            costs = CostTable.even(running.schedule.stages)
            self._search = running.schedule, OrderSearch(running.schedule, costs, running.plan.parallel.replicas)
        return self._search[1]
