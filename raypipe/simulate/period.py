"""Period: the steady time per step when steps follow one another without a global barrier.

The endless run is a linear system over (max, +), and its rate is the largest mean weight of a cycle from a step
to later ones (Baccelli et al. 1992, Synchronization and Linearity, chapter 3). Policy iteration finds it
(Cochet-Terrasson et al. 1998; Dasdan 2004 for keeping what does not improve): a policy says for every carried time
which one of the step before it comes from. Its cycles are real ones, so the rate is no less than the mean of any; it
ends when no other origin would make a time later, so the rate is no more.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import NamedTuple

from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import NETWORK
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.schedule.sharding import Collective
from raypipe.schedule.sharding import collectives as collectives_of
from raypipe.schedule.walk import WalkTimes, dependency_lags
from raypipe.simulate.cyclic import CyclicGraph, cyclic
from raypipe.simulate.engine import simulate


class Steady(NamedTuple):
    """A step that repeats for ever."""

    rate: float
    """Time from one step to the next."""
    starts: tuple[float, ...]
    """Per device, when it may begin the step, on one clock for all; of a synchronous schedule, else empty. With these
    starts every device ends within ``rate`` of its own."""


def period(schedule: Schedule, costs: CostTable, graph: TaskGraph | None = None, norm: NormPolicy = "none") -> float:
    """Steady time per step, in the cost table's unit.

    A device begins its next step as soon as its own order is done; a stage's next forward waits for its weights (see
    ``cyclic``). Zero-bubble methods improve this, not the makespan. ``norm`` says what updates have to do with the
    global gradient norm; with ``wait`` every synchronous step takes its makespan.

    Raises:
        ScheduleError: the schedule cannot run; or ``norm`` for one without updates.
    """
    return steady(schedule, costs, graph, norm).rate


def steady(schedule: Schedule, costs: CostTable, graph: TaskGraph | None = None, norm: NormPolicy = "none") -> Steady:
    """The period, and where in it the devices begin.

    Raises:
        ScheduleError: as ``period``.
    """
    if schedule.versions == "flush" and graph is None:
        graph = link(schedule)
    turn = cyclic(schedule, costs, graph, norm)
    rate, state = _rate(turn)
    starts: tuple[float, ...] = ()
    if schedule.versions == "flush" and graph is not None:
        ends = [state.get(b - 1, 0.0) if b > a else 0.0 for a, b in itertools.pairwise(graph.first)]
        least = min(ends, default=0.0)
        starts = tuple(end - least for end in ends)
    return Steady(rate / turn.steps, starts)


def _rate(cycle: CyclicGraph) -> tuple[float, dict[int, float]]:
    """Time of one turn, and of each carried time where it can be when every turn takes that long."""
    sources = sorted({j for waits in cycle.carried.values() for j, _ in waits})
    state = dict.fromkeys(sources, 0.0)
    origin: dict[int, int] = {}
    weight: dict[int, float] = {}
    rate = 0.0
    slack = 1e-12 * max(1.0, sum(cycle.durations))
    for _ in range(8 * len(sources) + 50):  # far more than were ever seen to be needed
        done = cycle.turn(state)
        after = done.end
        better = [j for j in sources if j not in origin or after[j] - rate > state[j] + slack]
        if not better:
            break
        origins = _Origins(cycle, done, state)
        for j in better:  # only these: where others tie, a changing mind can go round a longer cycle for ever
            origin[j] = origins.of(j)
            weight[j] = after[j] - state[origin[j]]
        mean, circle = _best_cycle(origin, weight)
        rate = max(rate, mean)
        if all(after[j] - rate <= state[j] + slack for j in better):
            break
        for j in better:
            state[j] = max(state[j], after[j] - rate)
        _follow(origin, weight, rate, circle, state)
    return rate, state


class _Origins:
    """Which time of the step before decided when a task ends: the origin of the longest path to it."""

    def __init__(self, cycle: CyclicGraph, done: WalkTimes, state: dict[int, float]) -> None:
        self.cycle, self.tasks, self.done, self.state = cycle, cycle.graph.tasks, done, state
        self.dependencies = dependency_lags(cycle.graph, cycle.comm)
        self.known: dict[int, int] = {}
        self.first = set(cycle.graph.first)

    @cached_property
    def part_of(self) -> dict[int, Collective]:
        """Network task -> the collective that it is part of."""
        return collectives_of(self.cycle.graph)

    @cached_property
    def collectives(self) -> dict[Collective, list[int]]:
        """The tasks of each collective."""
        found: dict[Collective, list[int]] = {}
        for i, one in self.part_of.items():
            found.setdefault(one, []).append(i)
        return found

    def of(self, task: int) -> int:
        """A task of the step before."""
        path = [task]
        while path[-1] not in self.known:
            before, previous = self._latest(path[-1])
            if before is not None:
                self.known[path[-1]] = before
            else:
                path.append(previous)
        found = self.known[path[-1]]
        self.known.update(dict.fromkeys(path, found))
        return found

    def _latest(self, i: int) -> tuple[int | None, int]:
        """Return what ``i`` waited for longest: a task of the step before, else (None, a task of this step).

        Of equally late ones: a dependency without a message, then the task before it on its lane.
        """
        at, end, also = self.done.start[i], self.done.end, self.cycle.also.get(i, ())
        if self.tasks[i].kind in NETWORK:
            return self._latest_of_group(self.collectives[self.part_of[i]], at)
        dependencies = self.dependencies(i)
        for p, lag in dependencies:
            if end[p] == at and not lag:
                return None, p
        previous = self._previous(i, False)
        if previous is not None and end[previous] == at:
            return None, previous
        for p, lag in (*(wait for wait in also if not wait[1]), *dependencies, *also):
            if end[p] + lag == at:
                return None, p
        return next(j for j, lag in self.cycle.carried[i] if self.state[j] + lag == at), i

    def _latest_of_group(self, group: list[int], at: float) -> tuple[int | None, int]:
        """The same of an all-reduce: every holder waits for whatever one of them waits for."""
        waits = {p for i in group for p, _ in self.dependencies(i)}
        lanes = [self._previous(i, network) for i in group for network in (False, True)]  # issued after compute
        waits.update(p for p in lanes if p is not None)
        for p in sorted(waits.difference(group)):
            if self.done.end[p] == at:
                return None, p
        before = sorted(wait for i in group for wait in self.cycle.carried.get(i, ()))
        return next(j for j, lag in before if self.state[j] + lag == at), group[0]

    def _previous(self, i: int, network: bool) -> int | None:
        """The task before ``i`` on its device's network or compute lane."""
        while i not in self.first:
            i -= 1
            if (self.tasks[i].kind in NETWORK) == network:
                return i
        return None


def gains_ahead(schedule: Schedule, costs: CostTable) -> bool:
    """Return whether steps follow one another faster if devices run ahead of the gradient norm than if they wait.

    ``schedule`` with its updates. False for PipeDream, whose updates know no global norm. The latency of the norm
    itself, which every schedule could hide, is left out: it does not pay for the copies that running ahead takes.
    """
    if schedule.versions != "flush":
        return schedule.versions == "2bw"
    graph = link(schedule)
    return period(schedule, costs, graph, "optimistic") < simulate(schedule, costs, graph).makespan * (1 - 1e-9)


def _best_cycle(origin: dict[int, int], weight: dict[int, float]) -> tuple[float, list[int]]:
    """The largest mean weight of a cycle of the policy, and that cycle."""
    best: tuple[float, list[int]] = float("-inf"), []
    seen = set[int]()
    for begin in origin:
        path: dict[int, int] = {}
        j = begin
        while j not in seen:
            seen.add(j)
            path[j] = len(path)
            j = origin[j]
        if j in path:
            circle = [k for k, n in path.items() if n >= path[j]]
            best = max(best, (sum(weight[k] for k in circle) / len(circle), circle))
    return best


def _follow(
    origin: dict[int, int], weight: dict[int, float], rate: float, circle: list[int], state: dict[int, float]
) -> None:
    """Set the times that lead back to ``circle`` to what the policy gives: each edge adds its weight minus the rate.

    One time on the circle is held fixed; times that lead elsewhere stay what they are.
    """
    leads: dict[int, list[int]] = {}
    for j, source in origin.items():
        leads.setdefault(source, []).append(j)
    fixed = circle[0]
    done = {fixed}
    todo = [fixed]
    for source in todo:
        for j in leads.get(source, ()):
            if j not in done:
                done.add(j)
                state[j] = weight[j] + state[source] - rate
                todo.append(j)
