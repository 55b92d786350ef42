"""The programs of calls: from the plan's own schedule, for any number of micro-batches, and the update apart from them.

A training step of a run is one program with its gradient sums and updates at the end. Here the two are programs of
their own: any number of calls adds to the gradients, and then one sums them and updates.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, NamedTuple

from raypipe.errors import ScheduleError
from raypipe.plan.plan import Plan, build_schedule
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import BOOKKEEPING, KINDS
from raypipe.schedule.lowering.programs import Program, programs
from raypipe.schedule.lowering.safe_order import gpu_programs
from raypipe.schedule.passes import forwards_alone
from raypipe.search import search

KEPT = 32
"""Orders, and programs of each kind, that are kept for the next call with as many micro-batches."""
TRIED = 64
"""Numbers of micro-batches that are tried from the wanted one upwards; Chimera wants a multiple of its devices."""
SEARCH_S = 0.3
"""Seconds to search an order for another number of micro-batches, where the plan's was searched too."""

Kind = Literal["forward", "backward", "update"]


class Key(NamedTuple):
    """The use of a program."""

    kind: Kind
    microbatches: int
    """Ids of the schedule, over all replicas; 0 for an update."""


class CallPrograms:
    """Makes and keeps the programs of a plan.

    Args:
        plan: the plan.
        batch: sequences of the step that the plan was made for.
        gpus: whether devices are GPUs, whose transfers then get an order that cannot deadlock.
    """

    def __init__(self, plan: Plan, batch: int, gpus: bool) -> None:
        self._plan, self._gpus = plan, gpus
        self._whole = build_schedule(plan, batch)
        self._orders: OrderedDict[int, Schedule] = OrderedDict()
        self._fits: dict[int, int] = {}

    @property
    def each(self) -> int:
        """Sequences of a micro-batch of the schedule."""
        return int(self._plan.parallel.microbatch * self._whole.share_of_samples)

    def fitting(self, sequences: int) -> int:
        """Return the least number of micro-batches that the schedule has an order for and that hold these sequences.

        Raises:
            ScheduleError: it has none of about that size.
        """
        wanted = -(-sequences // self._plan.parallel.microbatch)
        result = self._fits.get(wanted)
        if result is None:
            result = self._fits[wanted] = self._order(wanted).microbatches
        return result

    def _order(self, wanted: int) -> Schedule:
        """Return the compute tasks of all devices for at least ``wanted`` of the plan's micro-batches."""
        replicas = self._plan.parallel.replicas
        first = -(-wanted // replicas)
        for per_copy in range(first, first + TRIED):
            try:
                schedule = self._of(per_copy)
            except ScheduleError as error:
                refused = error
                continue
            self._orders[schedule.microbatches] = schedule
            if len(self._orders) > KEPT:
                self._orders.popitem(last=False)
            return schedule
        raise refused

    def _of(self, per_copy: int) -> Schedule:
        plan = self._plan
        parallel = plan.parallel
        order = None
        if parallel.schedule == "auto":
            present = plan.order()
            order = present
            if present.microbatches != per_copy:
                even = CostTable.even(present.stages)
                order = search(
                    present.placement, per_copy, even, graph=present.graph, budget_s=SEARCH_S, rules=present.rules
                ).schedule
        batch = per_copy * parallel.replicas * parallel.microbatch
        made = Plan.of(parallel, plan.cut, batch, order, plan.frozen)
        return build_schedule(made, batch).without(BOOKKEEPING)

    def programs(self, key: Key) -> list[Program]:
        """Return the program of each device for a call; the number of micro-batches is one of ``fitting``.

        Raises:
            ScheduleError: it could deadlock on GPUs.
        """
        if key.kind == "update":
            updates = self._whole.without(frozenset(KINDS) - {"AR", "U"})
            return programs(updates)
        schedule = self._orders.get(key.microbatches)
        if schedule is None:
            whole = key.microbatches * self._whole.share_of_samples
            schedule = self._order(int(whole))
        forwards, backwards = programs(forwards_alone(schedule)), programs(schedule)
        if self._gpus:
            safe, forwards = gpu_programs({(True, True): backwards}, forwards, schedule.microbatches, "flush", {})
            backwards = safe[True, True]
        return forwards if key.kind == "forward" else backwards
