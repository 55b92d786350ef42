"""Period: the steady time per step when steps follow one another without a global barrier.

The endless run is a linear system over (max, +), and its rate is the largest mean weight of a cycle from a step
to later ones (Baccelli et al. 1992, Synchronization and Linearity, chapter 3). Policy iteration (Cochet-Terrasson
et al. 1998) finds it: each round times one step, follows back what every carried time came from, and thereby
finds a real cycle (the rate is no less); it ends when no start could be later (the rate is no more).
"""

from __future__ import annotations

from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import TaskGraph
from raypipe.schedule.ir import Schedule
from raypipe.simulate.cyclic import CyclicGraph, cyclic


def period(schedule: Schedule, costs: CostTable, graph: TaskGraph | None = None) -> float:
    """Steady time per step, in the cost table's unit.

    A device begins its next step as soon as its own order is done; a stage's next forward waits for its weights (see
    ``cyclic``). Zero-bubble methods improve this, not the makespan.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    turn = cyclic(schedule, costs, graph)
    sources = sorted({j for waits in turn.carried.values() for j, _ in waits})
    if not sources:
        return 0.0
    state = dict.fromkeys(sources, 0.0)
    rate = 0.0
    slack = 1e-12 * max(1.0, sum(turn.durations))
    for _ in range(2 * len(sources) + 10):  # an improving path has at most one edge per source
        after, came_from = _one_step(turn, state)
        rate = max(rate, _best_cycle(after, state, came_from))
        late = _follow(after, state, came_from, rate)
        if all(late[j] <= state[j] + slack for j in sources):
            break
        state = {j: max(state[j], late[j]) for j in sources}
    return rate / turn.steps


def _one_step(turn: CyclicGraph, state: dict[int, float]) -> tuple[dict[int, float], dict[int, int]]:
    """End of each source one step later, and the source of the step before that decided it."""
    end = [0.0] * len(turn.durations)
    root = [-1] * len(turn.durations)
    local, remote, durations, comm, carried = turn.local, turn.remote, turn.durations, turn.comm, turn.carried
    nowhere = float("-inf")
    for i in turn.order:
        at, origin = nowhere, -1
        for p in local[i]:
            if end[p] > at:
                at, origin = end[p], root[p]
        for p in remote[i]:
            if end[p] + comm > at:
                at, origin = end[p] + comm, root[p]
        if i in carried:
            for j, lag in carried[i]:
                if state[j] + lag > at:
                    at, origin = state[j] + lag, j
        end[i], root[i] = at + durations[i], origin
    return {j: end[j] for j in state}, {j: root[j] for j in state}


def _best_cycle(after: dict[int, float], state: dict[int, float], came_from: dict[int, int]) -> float:
    """Largest mean weight of a cycle of the policy; along a cycle the states cancel out."""
    best, seen = 0.0, set[int]()
    for begin in came_from:
        path: dict[int, int] = {}
        j = begin
        while j not in seen:
            seen.add(j)
            path[j] = len(path)
            j = came_from[j]
        if j in path:
            circle = [k for k, n in path.items() if n >= path[j]]
            best = max(best, sum(after[k] - state[k] for k in circle) / len(circle))
    return best


def _follow(
    after: dict[int, float], state: dict[int, float], came_from: dict[int, int], rate: float
) -> dict[int, float]:
    """Latest normalised times that the policy's paths give: each edge adds its weight minus the rate."""
    value: dict[int, float] = {}
    for begin in came_from:
        path: list[int] = []
        j = begin
        while j not in value and j not in path:
            path.append(j)
            j = came_from[j]
        if j not in value:  # a cycle: hold one of its times fixed
            value[j] = state[j]
        for k in reversed(path):
            if k != j or k not in value:
                source = came_from[k]
                value[k] = after[k] - state[source] + value[source] - rate
    return {j: max(value[j], after[j] - rate) for j in value}
