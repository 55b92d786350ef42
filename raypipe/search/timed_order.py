"""An order of all tasks and its times, updated incrementally while tasks move along their device.

The state is the head and the tail of every task (the longest paths to and from it) and one topological order. A move
changes one range of the topological order: tasks before that range keep their heads, tasks after it their tails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raypipe.search.problem import DeviceOrders, Problem


class Step(NamedTuple):
    """Move ``task`` past its neighbours in its device's order."""

    task: int
    passed: list[int]
    """The neighbours, in device order: all before ``task`` if it moves left, all after it if it moves right."""
    left: bool


class Move(NamedTuple):
    """One or two steps within a run of adjacent tasks."""

    steps: tuple[Step, ...]
    row: list[int]
    """The run after the move."""
    first: int
    """The first task of the run before the move."""
    last: int
    """The last task of the run before the move."""

    @staticmethod
    def single(task: int, passed: list[int], left: bool) -> Move:
        """Move one task past others."""
        if left:
            return Move((Step(task, passed, True),), [task, *passed], passed[0], task)
        return Move((Step(task, passed, False),), [*passed, task], task, passed[-1])


class Frame(NamedTuple):
    """How an order is measured: its value is the largest ``last end + due`` of a device.

    All zeros give the makespan. With ``due`` minus each device's first start, the value is the span. With ``release``
    the devices' starts in steady state and ``due`` minus them, it is the period.
    """

    release: Sequence[float]
    """Per device, the earliest start of its first task."""
    due: Sequence[float]
    """Per device, added to its last end."""


class Arcs:
    """Per-task times and dependencies, which all orders of a problem share."""

    def __init__(self, p: Problem) -> None:
        self.time = [p.time[c] for c in p.lane] + [0.0] * p.devices
        self.before: list[tuple[tuple[int, float], ...]] = []
        self.after: list[tuple[tuple[int, float], ...]] = []
        for t, c in enumerate(p.lane):
            m = t - p.base[c]
            self.before.append(tuple((p.base[e] + m, lag) for e, lag in p.before[c]))
            self.after.append(tuple((p.base[e] + m, lag) for e, lag in p.after[c]))
        self.bound_to = [
            frozenset(q for q, _ in (*self.before[t], *self.after[t]) if p.device[p.lane[q]] == p.device[c])
            for t, c in enumerate(p.lane)
        ]
        """Per task, the tasks of its own device that it depends on or feeds directly: it cannot move past them."""


class TimedOrder:
    """An order and its times; index ``tasks + d`` is a sentinel before and after the tasks of device d."""

    def __init__(self, p: Problem, frame: Frame | None = None, arcs: Arcs | None = None) -> None:
        self.problem = p
        n = p.tasks
        release, due = frame or ((0.0,) * p.devices,) * 2
        arcs = arcs or Arcs(p)
        self.lane = p.lane
        self.time, self.before, self.after, self.bound_to = arcs.time, arcs.before, arcs.after, arcs.bound_to
        self.prev, self.next = [n] * (n + p.devices), [n] * (n + p.devices)
        self.end, self.rest = [0.0] * n + list(release), [0.0] * n + list(due)
        """``end``: when each task ends. ``rest``: longest path from each task's start to the end of the frame."""
        self.live = [0.0] * n
        """Live activations on the device just before each task starts."""
        self.topological: list[int] = []
        self.rank = [0] * (n + p.devices)
        self.last: list[int] = [n + d for d in range(p.devices)]
        self.value = 0.0
        """The order's value in the frame."""
        self.limited = any(cap != float("inf") for cap in p.cap)

    def load(self, orders: DeviceOrders) -> None:
        """Load an order that can run."""
        p, n = self.problem, self.problem.tasks
        waits = [len(b) for b in self.before]
        for d, order in enumerate(orders):
            live, previous = 0.0, n + d
            for t in order:
                self.prev[t] = previous
                if previous < n:
                    self.next[previous] = t
                    waits[t] += 1
                self.live[t] = live
                live += p.takes[p.lane[t]] - p.frees[p.lane[t]]
                previous = t
            if previous < n:
                self.next[previous] = n + d
            self.last[d] = previous
        ready = [t for t, w in enumerate(waits) if not w]
        for t in ready:
            follow = self.next[t]
            if follow < n:
                waits[follow] -= 1
                if not waits[follow]:
                    ready.append(follow)
            for s, _ in self.after[t]:
                waits[s] -= 1
                if not waits[s]:
                    ready.append(s)
        assert len(ready) == n, "an order that cannot run"
        self.topological = ready
        for k, t in enumerate(ready):
            self.rank[t] = k
        self._heads(0)
        self._tails(n - 1)

    def orders(self) -> DeviceOrders:
        """Return the current order."""
        n = self.problem.tasks
        result: DeviceOrders = []
        for t in self.last:
            order = []
            while t < n:
                order.append(t)
                t = self.prev[t]
            result.append(order[::-1])
        return result

    @property
    def makespan(self) -> float:
        """When the last task ends."""
        return max(self.end[t] for t in self.last)

    @property
    def span(self) -> float:
        """The longest time from a device's first start to its last end."""
        longest, n = 0.0, self.problem.tasks
        for last in self.last:
            first = last
            while first < n and self.prev[first] < n:
                first = self.prev[first]
            if first < n:
                longest = max(longest, self.end[last] - self.end[first] + self.time[first])
        return longest

    def _heads(self, first: int) -> None:
        prev, before, end, time = self.prev, self.before, self.end, self.time
        for t in self.topological[first:]:
            at = end[prev[t]]
            for q, lag in before[t]:
                ready = end[q] + lag
                if ready > at:
                    at = ready
            end[t] = at + time[t]
        n = self.problem.tasks
        self.value = max(end[t] + self.rest[n + d] for d, t in enumerate(self.last))

    def _tails(self, last: int) -> None:
        follow, after, rest, time = self.next, self.after, self.rest, self.time
        for t in self.topological[last::-1]:
            left = rest[follow[t]]
            for s, lag in after[t]:
                x = rest[s] + lag
                if x > left:
                    left = x
            rest[t] = left + time[t]

    def estimate(self, move: Move) -> float:
        """Estimate the value after a move: the longest path through the run if all other tasks kept their times.

        Source: Balas and Vazacopoulos 1998.
        """
        row = move.row
        at = self.end[self.prev[move.first]]
        ends, before, end, time = [], self.before, self.end, self.time
        fresh: dict[int, float] = {}
        for t in row:
            for q, lag in before[t]:
                ready = fresh.get(q)
                ready = end[q] + lag if ready is None else ready
                if ready > at:
                    at = ready
            at += time[t]
            fresh[t] = at
            ends.append(at)
        rest, after = self.rest, self.after
        back = rest[self.next[move.last]]
        longest = 0.0
        known: dict[int, float] = {}
        for k in range(len(row) - 1, -1, -1):
            t = row[k]
            for s, lag in after[t]:
                x = known.get(s)
                x = rest[s] + lag if x is None else x
                if x > back:
                    back = x
            if ends[k] + back > longest:
                longest = ends[k] + back
            back += time[t]
            known[t] = back
        return longest

    def fits(self, move: Move) -> bool:
        """Return whether the device stays within its memory limit after the move."""
        if not self.limited:
            return True
        p, row = self.problem, move.row
        live = self.live[move.first]
        cap = p.cap[p.device[self.lane[row[0]]]] + 1e-9
        for t in row:
            c = self.lane[t]
            live += p.takes[c]
            if live > cap:
                return False
            live -= p.frees[c]
        return True

    def apply(self, move: Move) -> bool:
        """Apply the move and update all times; False, with nothing changed, if it would create a cycle."""
        reach = [self._step(step) for step in move.steps[:1]]
        if reach[0] is None:
            return False
        if len(move.steps) > 1:
            reach.append(self._step(move.steps[1]))
            if reach[1] is None:
                task, passed, left = move.steps[0]
                self._step(Step(task, passed, not left))
                return False
        self._heads(min(r[0] for r in reach if r))
        self._tails(max(r[1] for r in reach if r))
        return True

    def _step(self, step: Step) -> tuple[int, int] | None:
        """Apply one step; return the range of the topological order that changed, or None if it creates a cycle."""
        task, passed, left = step
        before, prev, rank = self.before, self.prev, self.rank
        first, final = (rank[passed[0]], rank[task]) if left else (rank[task], rank[passed[-1]])
        stretch = self.topological[first : final + 1]
        # Successors of the tasks that move back must follow them, so they move behind the tasks that move forward.
        behind = set(passed) if left else {task}
        goes_early = {task} if left else set(passed)
        early, late = [], []
        for t in stretch:
            if t in behind:
                late.append(t)
                continue
            if t not in goes_early and prev[t] in behind:
                behind.add(t)
                late.append(t)
                continue
            for q, _ in before[t]:
                if q in behind:
                    if t in goes_early:
                        return None
                    behind.add(t)
                    late.append(t)
                    break
            else:
                early.append(t)
        self._relink(task, passed, left)
        self.topological[first : final + 1] = early + late
        for k, t in enumerate(early + late, first):
            rank[t] = k
        return first, final

    def _relink(self, task: int, passed: list[int], left: bool) -> None:
        p, n, prev, follow = self.problem, self.problem.tasks, self.prev, self.next
        row = [task, *passed] if left else [*passed, task]
        outer = prev[passed[0] if left else task]
        beyond = follow[task if left else passed[-1]]
        live = self.live[passed[0] if left else task]
        previous = outer
        for t in row:
            prev[t] = previous
            if previous < n:
                follow[previous] = t
            self.live[t] = live
            live += p.takes[p.lane[t]] - p.frees[p.lane[t]]
            previous = t
        follow[previous] = beyond
        if beyond < n:
            prev[beyond] = previous
        else:
            self.last[beyond - n] = previous
