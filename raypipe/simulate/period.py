"""Period: the steady time per step when steps follow one another without a global barrier.

The endless run is a linear system over (max, +), and its rate is the largest mean weight of a cycle from a step
to later ones (Baccelli et al. 1992, Synchronization and Linearity, chapter 3). Policy iteration finds it
(Cochet-Terrasson et al. 1998; Dasdan 2004 for keeping what does not improve): a policy says for every carried time
which one of the step before it comes from. Its cycles are real ones, so the rate is no less than the mean of any; it
ends when no other origin would make a time later, so the rate is no more.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.norm_policy import NormPolicy
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


def _rate(turn: CyclicGraph) -> tuple[float, dict[int, float]]:
    """Time of one turn, and of each carried time where it can be when every turn takes that long."""
    sources = sorted({j for waits in turn.carried.values() for j, _ in waits})
    state = dict.fromkeys(sources, 0.0)
    origin: dict[int, int] = {}
    weight: dict[int, float] = {}
    rate = 0.0
    slack = 1e-12 * max(1.0, sum(turn.durations))
    for _ in range(8 * len(sources) + 50):  # far more than were ever seen to be needed
        after, came_from = _one_step(turn, state)
        better = [j for j in sources if j not in origin or after[j] - rate > state[j] + slack]
        if not better:
            break
        for j in better:  # only these: where others tie, a changing mind can go round a longer cycle for ever
            origin[j], weight[j] = came_from[j], after[j] - state[came_from[j]]
        mean, circle = _best_cycle(origin, weight)
        rate = max(rate, mean)
        if all(after[j] - rate <= state[j] + slack for j in better):
            break
        for j in better:
            state[j] = max(state[j], after[j] - rate)
        _follow(origin, weight, rate, circle, state)
    return rate, state


def gains_ahead(schedule: Schedule, costs: CostTable) -> bool:
    """Whether steps follow one another faster when devices run ahead of the global gradient norm than when they wait.

    ``schedule`` with its updates. False for PipeDream, whose updates know no global norm. The latency of the norm
    itself, which every schedule could hide, is left out: it does not pay for the copies that running ahead takes.
    """
    if schedule.versions != "flush":
        return schedule.versions == "2bw"
    graph = link(schedule)
    return period(schedule, costs, graph, "optimistic") < simulate(schedule, costs, graph).makespan * (1 - 1e-9)


def _one_step(turn: CyclicGraph, state: dict[int, float]) -> tuple[dict[int, float], dict[int, int]]:
    """End of each source one step later, and the source of the step before that decided it."""
    end = [0.0] * len(turn.durations)
    root = [-1] * len(turn.durations)
    local, remote, durations, carried = turn.local, turn.remote, turn.durations, turn.carried
    nowhere = float("-inf")
    for i in turn.order:
        at, origin = nowhere, -1
        for p in local[i]:
            if end[p] > at:
                at, origin = end[p], root[p]
        for p, lag in remote[i]:
            if end[p] + lag > at:
                at, origin = end[p] + lag, root[p]
        if i in carried:
            for j, lag in carried[i]:
                if state[j] + lag > at:
                    at, origin = state[j] + lag, j
        end[i], root[i] = at + durations[i], origin
    return {j: end[j] for j in state}, {j: root[j] for j in state}


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
