"""The search: it builds many orders, then shortens the best of them along their critical paths.

It stops when the budget is spent or when a lower bound proves that no order is shorter.

It is simulated annealing with restarts, after a portfolio of list schedules. A round starts from a list schedule with
perturbed settings, from one of the best orders, from one of these rebuilt, or from a crossover of two. Of each length
only one order is kept among the best, because orders of equal length mostly differ only in tasks off the critical path.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import get_args

from raypipe.errors import ScheduleError, nearest
from raypipe.schedule.costs import CostTable
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Rules, Schedule, StageGraph
from raypipe.search.budget import Budget
from raypipe.search.list_scheduling import LaneArrays, Listed, Setting, decode, disturbed, list_schedule
from raypipe.search.objective import Measure, Objective
from raypipe.search.order_walk import shortened, times
from raypipe.search.priorities import alternating, portfolio, published, shaken
from raypipe.search.problem import DeviceOrders, Problem, build

_CONSTRUCT = 0.35
"""Share of the budget for the portfolio."""
_LARGE, _PUBLISHED = 5000, 0.5
"""With more tasks than the first, trying published orders stops once the second share of the budget is spent."""
_ELITE = 8
"""Orders kept as starts."""
_HOPELESS = 1.3
"""A list schedule whose span exceeds this many times the best period is not worth computing its period."""
_OPENING, _SHORT, _DEEP = 15_000, 7_000, 36_000
"""Tries per round: from each family of the portfolio, from a new start, and from one of the best orders."""
_STATES = 100_000
"""States by which ``one_device_bound`` may tighten the bound, per second of the budget: some 5 % of it."""
_SECONDS_PER_TASK = 8e-9
"""Approximate seconds of one try, per task of the problem."""


class Rounds:
    """The state of one search: the orders found so far, and the settings that made them."""

    def __init__(
        self,
        p: Problem,
        costs: CostTable,
        objective: Objective,
        budget: Budget,
        rng: random.Random,
        enough: float = 0.0,
    ) -> None:
        self.p, self.costs, self.objective, self.budget, self.rng = p, costs, objective, budget, rng
        self.layout = LaneArrays.of(p)
        self.measure = Measure(self.layout, costs, objective)
        self.bound, self.enough = self.measure.bound(), enough
        self.goal = max(self.bound, enough) * (1 + 1e-9)
        """The search stops at this value: it is proven optimal, or good enough."""
        self.elite: dict[float, DeviceOrders] = {}
        """Value of the objective -> an order with that value."""
        self.settings: dict[tuple[float, float], Setting] = {}
        """(makespan, span) -> a setting that gives them; different values mean different orders."""
        self.families: dict[tuple[float, ...], tuple[float, DeviceOrders]] = {}
        """``Setting.ahead`` -> (makespan, order) of the shortest order of the portfolio with that setting."""
        self.tried = 0

    @property
    def best(self) -> float:
        """The smallest value found so far."""
        return min(self.elite, default=float("inf"))

    def done(self) -> bool:
        """Return whether the goal is reached or the budget spent."""
        return bool(self.elite) and (self.best <= self.goal or self.budget.left <= 0)

    def keep(self, orders: DeviceOrders, value: float) -> None:
        """Add an order to the best ones, dropping the worst beyond ``_ELITE``."""
        self.elite[value] = orders
        if len(self.elite) > _ELITE:
            del self.elite[max(self.elite)]

    def start_from(self, orders: DeviceOrders) -> None:
        """Evaluate an order and add it to the best ones."""
        self.keep(orders, self.measure.value(orders))

    def construct(self) -> None:
        """Build list schedules for at most ``_CONSTRUCT`` of the budget, then add the published orders.

        Unless the problem is large, all published orders are added even if the budget is spent, so that the result is
        never longer than one of them.

        Raises:
            ScheduleError: no order fits the memory limit.
        """
        after_portfolio = (1 - _CONSTRUCT) * self.budget.seconds
        after_published = (1 - _PUBLISHED) * self.budget.seconds
        for setting in portfolio(self.p):
            listed = self._list(setting)
            if listed is not None and listed.makespan < self.families.get(setting.ahead, (float("inf"),))[0]:
                self.families[setting.ahead] = listed.makespan, listed.orders
            if self.done() or (self.elite and self.budget.left < after_portfolio):
                break
        if self.best > self.goal:
            for orders in itertools.chain(published(self.p, self.costs), alternating(self.p)):
                self.start_from(orders)
                if self.p.tasks > _LARGE and self.budget.left < after_published:
                    break
        if not self.elite:
            raise ScheduleError("auto", "no order keeps the memory limit", "raise the memory limit")

    def _list(self, setting: Setting) -> Listed | None:
        listed = list_schedule(self.layout, setting)
        if listed is None:
            return None
        self.tried += 1
        self.settings.setdefault((listed.makespan, listed.span), setting)
        if self.objective == "makespan":
            self.keep(listed.orders, listed.makespan)
        elif self.objective == "span" or listed.span < _HOPELESS * self.best:  # a period is rarely far below its span
            self.keep(listed.orders, listed.span if self.objective == "span" else self.measure.value(listed.orders))
        return listed

    def tighten(self) -> None:
        """Tighten the bound by what is known of the best order so far, if that is not good enough yet."""
        if self.best > self.goal:
            states = int(_STATES * self.budget.seconds)
            self.bound = max(self.bound, self.measure.tighter_bound(self.best, states))
            self.goal = max(self.bound, self.enough) * (1 + 1e-9)

    def shorten(self) -> None:
        """Run rounds of the walk until the goal is reached or the budget spent."""
        tries = self.budget.left / (_SECONDS_PER_TASK * self.p.tasks)
        few = tries < 2 * _DEEP  # too large a problem for many starts
        if not few:
            # Start once from each family, good or bad: how far forwards run ahead is what moves change least.
            for _, orders in self.families.values():
                if not self.done():
                    self._round(orders, min(_OPENING, int(tries / 2 / len(self.families))))
        while not self.done():
            draw = self.rng.random()
            if few or draw < 0.25:
                ranked = sorted(self.elite)
                value = ranked[0] if few else self.rng.choice(ranked[:3])
                self._round(self.elite[value], _DEEP)
            elif draw < 0.5 and len(self.elite) > 1:
                a, b = self.rng.sample(sorted(self.elite), 2)
                child = cross(self.layout, self.elite[a], self.elite[b], self.rng.uniform(0.2, 0.8))
                if child is not None:
                    self._round(child, _SHORT)
            elif draw < 0.7:
                child = self._recreated(self.elite[self.rng.choice(sorted(self.elite)[:3])])
                if child is not None:
                    self._round(child, _SHORT)
            else:
                listed = self._list(self._shaken() if self.rng.random() < 0.5 else self._known())
                if listed is not None:
                    self._round(listed.orders, _SHORT)

    def _round(self, orders: DeviceOrders, tries: int) -> None:
        frame = self.measure.frame(orders)
        found, value = shortened(self.layout, orders, self.goal, self.budget, self.rng, tries, frame)
        self.keep(found, value if frame is None else self.measure.value(found))

    def _recreated(self, orders: DeviceOrders) -> DeviceOrders | None:
        """Perturb the start times of an order and decode them; None on a deadlock."""
        starts, ends, _ = times(self.layout, orders)
        span = max(ends)
        wish = disturbed(self.layout, starts, span, self.rng)
        return decode(self.layout, wish, self.rng.choice((0.0, 0.01 * span, 0.03 * span, float("inf"))))

    def _known(self) -> Setting:
        return self.rng.choice(list(self.settings.values()))

    def _shaken(self) -> Setting:
        """Perturb a setting that was tried; for span and period, one of the better settings."""
        if self.objective == "makespan":
            return shaken(self.p, self._known(), self.rng)
        ranked = sorted(self.settings, key=lambda values: values[::-1])[:24]
        near = ranked[min(self.rng.randrange(len(ranked)), self.rng.randrange(len(ranked)))]
        return shaken(self.p, self.settings[near], self.rng)

    def result(self) -> tuple[DeviceOrders, float]:
        """Return the best order and its value."""
        return self.elite[self.best], self.best


def cross(layout: LaneArrays, one: DeviceOrders, other: DeviceOrders, weight: float) -> DeviceOrders | None:
    """A crossover: each device's tasks sorted by a weighted mean of their start times in two orders.

    The mean of two feasible sets of start times keeps every dependency, so the result can run; only the memory limit
    needs a check. This resembles path relinking (Peng, Lue and Cheng 2015, tabu search with path relinking for the job
    shop). Returns the order between two others, ``weight`` of the way from ``other`` to
    ``one``, or None if it needs more memory.
    """
    p = layout.problem
    mean = [0.0] * p.tasks
    place = [0.0] * p.tasks
    for words, share in ((one, weight), (other, 1.0 - weight)):
        begin, _, in_turn = times(layout, words)
        for t in range(p.tasks):
            mean[t] += share * begin[t]
        # Tasks that take no time may start together; their places tell which comes first in both orders.
        for k, t in enumerate(in_turn):
            place[t] += share * k
    found = [sorted(word, key=lambda t: (mean[t], place[t])) for word in one]
    return found if p.fits(found) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best order that a search found, and a lower bound."""

    schedule: Schedule
    objective: Objective
    value: float
    """The objective of ``schedule``, in the cost table's unit."""
    makespan: float
    bound: float
    """No order within the same memory has a smaller value."""
    seconds: float
    """Wall time of the search."""
    tried: int
    """Orders that list scheduling built; moves of the local search are not counted."""

    @property
    def gap(self) -> float:
        """Relative gap to the bound: 0 is proven optimal, 0.01 is at most 1 % above the optimum."""
        return max(0.0, self.value / self.bound - 1.0) if self.bound > 0 else 0.0


def default_budget(tasks: int) -> float:
    """Seconds for a search of this many tasks: 2.5 up to 5000 tasks, about 11 at 64 stages x 256 micro-batches."""
    return 2.5 + max(0, tasks - 5000) / 5000


@cache
def load_machine_code() -> None:
    """Load the kernels before a budget begins: half a second in a process's first search, 20 on a machine's first."""
    load_orders()
    load_bounds()


def load_orders() -> None:
    """Load the kernels that make orders and improve them."""
    layout = LaneArrays.of(build(((0,),), 1, CostTable.even(1)))
    list_schedule(layout, Setting((0.0,) * len(layout.problem.kind)))
    decode(layout, [0.0] * layout.problem.tasks, 0.0)
    orders = [list(range(layout.problem.tasks))]
    Measure(layout, CostTable.even(1), "makespan").value(orders)
    shortened(layout, orders, 0.0, Budget(1.0), random.Random(0), 1)


def load_bounds() -> None:
    """Load those that bound them."""
    layout = LaneArrays.of(build(((0,),), 1, CostTable.even(1)))
    Measure(layout, CostTable.even(1), "makespan").tighter_bound(4.0, 100)


@no_collection()
def search(
    placement: Sequence[Sequence[int]],
    microbatches: int,
    costs: CostTable,
    *,
    graph: StageGraph | None = None,
    memory_limit: float | Sequence[float] | None = None,
    objective: Objective = "makespan",
    split: bool = True,
    rules: Rules | None = None,
    recompute: Collection[int] = (),
    freed_by_b: float = 0.0,
    budget_s: float | None = None,
    enough: float = 0.0,
    seed: int = 0,
    starts: Sequence[Schedule] = (),
    budget: Budget | None = None,
    sizes: Sequence[tuple[float, float]] | None = None,
) -> Found:
    """Find a short order for a placement.

    Args:
        placement: per replica, the device of each stage; see ``placements`` for those with a name.
        microbatches: number of micro-batches in a step, over all replicas; replica r runs those with
            ``id % replicas == r``.
        costs: one value per stage, and the latency between devices.
        graph: which stage feeds which; by default a chain.
        memory_limit: live activations per device, in units of one stage and micro-batch: one number, or one per
            device. By default there is no limit.
        objective: see ``Objective``.
        split: run B and W as separate tasks; otherwise the joint BW.
        rules: where dependencies differ from the default.
        recompute: stages that drop their activations after F and recompute them in R.
        freed_by_b: share of an activation that B frees; W frees the remainder.
        budget_s: seconds of wall time. Default: ``default_budget`` seconds of CPU time, so that a busy machine takes
            longer but finds the same order.
        enough: stop as soon as the objective is no greater than this.
        seed: seed of the random choices.
        starts: orders of the same tasks to start from, for example the running order when costs were measured again.
        budget: part of an enclosing search's budget; replaces ``budget_s``.
        sizes: per stage, what an activation takes up to its B and up to its W, in ``memory_limit``'s unit; by default 1
            each. With them, ``bound`` leaves memory out.

    Raises:
        ScheduleError: the costs have another number of stages, the objective is unknown, or no order fits the memory
            limit.
    """
    if objective not in get_args(Objective):
        raise ScheduleError("objective", f'"{objective}" is unknown', nearest(objective, get_args(Objective)))
    load_machine_code()
    given = budget
    budget = given or Budget(budget_s or 0.0, wall=budget_s is not None)
    p = build(
        placement,
        microbatches,
        costs,
        graph=graph,
        memory_limit=memory_limit,
        split=split,
        rules=rules,
        recompute=recompute,
        freed_by_b=freed_by_b,
        sizes=sizes,
    )
    if budget_s is None and given is None:
        budget.seconds = default_budget(p.tasks)
    run = Rounds(p, costs, objective, budget, random.Random(seed), enough)
    for schedule in starts:
        orders = p.orders(schedule)
        if orders is not None and p.fits(orders):
            run.start_from(orders)
    run.construct()
    run.tighten()
    run.shorten()
    run.tighten()
    orders, value = run.result()
    return Found(
        schedule=p.schedule(orders),
        objective=objective,
        value=value,
        makespan=max(times(run.layout, orders).end),
        bound=run.bound,
        seconds=budget.elapsed,
        tried=run.tried,
    )


# Search for the set of stages that recompute, around the search for an order.
#
# Only the early rule is searched, where an R may run at any time after its own forward: every order of the late rule is
# also an order of the early rule and ends no later there. The inner search decides when each R runs.


_ALL_UP_TO = 6
"""Up to this many stages, all subsets of them are candidates."""


def search_recompute(
    placement: Sequence[Sequence[int]],
    microbatches: int,
    costs: CostTable,
    *,
    memory_limit: float | Sequence[float] | None = None,
    objective: Objective = "makespan",
    split: bool = True,
    budget_s: float | None = None,
) -> Found:
    """Find a short order together with the stages that recompute.

    The search first tries all stages (least memory), all but the last (Merak's choice) and none, so that the result is
    never longer than a named schedule. With up to six stages it then tries every subset, in the order of their lower
    bounds. With more stages it starts from the best of the three and changes one stage at a time, until no change
    helps. A subset whose bound is no better than the best order found is skipped.

    Source: Lai et al. 2022 (Merak), sections 3.3 and 3.4; with F = R = 1, BW = 2 and one activation a device this finds
    the shifted critical path, 4N + 3(D - 2).

    Args:
        placement, microbatches, costs, memory_limit, objective, split: as in ``search``.
        budget_s: seconds of wall time for all choices together. Default: as much processor time as two searches get.

    Returns:
        The best order. Its bound holds for every choice of stages; with more than six stages it is the bound without
        recomputation and without a memory limit.

    Raises:
        ScheduleError: as ``search``; or no order fits the memory limit even if every stage recomputes.
    """
    load_machine_code()
    budget = Budget(0.0, wall=budget_s is not None)
    stages = len(placement[0])
    everything = frozenset(range(stages))

    def bound_of(chosen: frozenset[int], limit: float | Sequence[float] | None) -> float:
        """The lower bound with these stages recomputing; infinite if not even one micro-batch fits."""
        try:
            p = build(placement, microbatches, costs, memory_limit=limit, split=split, recompute=chosen)
        except ScheduleError:
            return float("inf")
        return Measure(LaneArrays.of(p), costs, objective).bound()

    best: Found | None = None
    chosen = everything

    def shorter(option: frozenset[int], share: float) -> bool:
        nonlocal best, chosen
        result = search(
            placement,
            microbatches,
            costs,
            memory_limit=memory_limit,
            objective=objective,
            split=split,
            recompute=option,
            budget=budget.part(share),
        )
        if best is not None and result.value >= best.value * (1 - 1e-9):
            return False
        best, chosen = result, option
        return True

    tasks = (4 if split else 3) * stages * microbatches
    budget.seconds = 2 * default_budget(tasks) if budget_s is None else budget_s
    starts = [(bound_of(s, memory_limit), sorted(s)) for s in (everything - {stages - 1}, frozenset[int]())]
    for bound, option in sorted(starts):
        if bound < (float("inf") if best is None else best.value * (1 - 1e-9)):
            with contextlib.suppress(ScheduleError):  # no order fits; with all stages recomputing one may
                shorter(frozenset(option), 0.15)
    if best is None or bound_of(everything, memory_limit) < best.value * (1 - 1e-9):
        shorter(everything, 0.15)
    assert best is not None
    if stages <= _ALL_UP_TO:
        subsets = [frozenset(s) for k in range(stages + 1) for s in itertools.combinations(range(stages), k)]
        options = sorted((bound_of(s, memory_limit), sorted(s)) for s in subsets)
        least = options[0][0]
    else:
        options, least = [], bound_of(frozenset(), None)
    while budget.left > 0:
        if stages > _ALL_UP_TO:
            near = [chosen ^ {stage} for stage in range(stages)]
            options = sorted((bound_of(s, memory_limit), sorted(s)) for s in near)
        improved = False
        for k, (bound, option) in enumerate(options):
            if bound >= best.value * (1 - 1e-9) or budget.left <= 0:
                break
            with contextlib.suppress(ScheduleError):
                improved = shorter(frozenset(option), max(0.1, 0.5 / (len(options) - k))) or improved
        if not improved or stages <= _ALL_UP_TO:
            break
    return replace(best, bound=min(best.value, least), seconds=budget.elapsed)
