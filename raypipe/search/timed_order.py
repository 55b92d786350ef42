"""An order of all tasks with its times, kept up to date while tasks move along their device.

Heads and tails of every task (the longest paths to and from it) and one topological order. A move touches one stretch
of that order: tasks before it keep their heads, tasks after it their tails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raypipe.search.problem import Problem, Words


class Step(NamedTuple):
    """Put ``task`` before or behind neighbours of its device's order."""

    task: int
    passed: list[int]
    """In device order; all before ``task`` (it moves left) or all after it (it moves right)."""
    left: bool


class Move(NamedTuple):
    """One or two steps within a run of neighbours."""

    steps: tuple[Step, ...]
    row: list[int]
    """The run as it will be."""
    first: int
    """Its first task now."""
    last: int
    """Its last task now."""

    @staticmethod
    def single(task: int, passed: list[int], left: bool) -> Move:
        """One task past others."""
        if left:
            return Move((Step(task, passed, True),), [task, *passed], passed[0], task)
        return Move((Step(task, passed, False),), [*passed, task], task, passed[-1])


class Frame(NamedTuple):
    """From when to when a step is measured: what is made small is the greatest ``end of a device + due``.

    No release and no due: the makespan. Due is minus each device's first start: the span. Release and minus due are
    when each device begins a step in steady state: the period.
    """

    release: Sequence[float]
    """Per device, when it may begin."""
    due: Sequence[float]
    """Per device, what is added to its last end."""


class Arcs:
    """What every order of a problem has in common, per task; made once."""

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
        """Tasks of its own device that each depends on or feeds directly: they keep their order."""


class Timed:
    """The order and its times; index ``tasks + d`` is a sentinel before and after the word of device d."""

    def __init__(self, p: Problem, frame: Frame | None = None, arcs: Arcs | None = None) -> None:
        self.problem = p
        n = p.tasks
        release, due = frame or ((0.0,) * p.devices,) * 2
        arcs = arcs or Arcs(p)
        self.lane = p.lane
        self.time, self.before, self.after, self.bound_to = arcs.time, arcs.before, arcs.after, arcs.bound_to
        self.prev, self.next = [n] * (n + p.devices), [n] * (n + p.devices)
        self.end, self.rest = [0.0] * n + list(release), [0.0] * n + list(due)
        """End of each task; time from its start to the end of what is measured."""
        self.live = [0.0] * n
        """Activations its device holds just before a task starts."""
        self.topological: list[int] = []
        self.rank = [0] * (n + p.devices)
        self.last: list[int] = [n + d for d in range(p.devices)]
        self.value = 0.0
        """The greatest end plus due."""
        self.limited = any(cap != float("inf") for cap in p.cap)

    def load(self, words: Words) -> None:
        """Take over an order that can run."""
        p, n = self.problem, self.problem.tasks
        waits = [len(b) for b in self.before]
        for d, word in enumerate(words):
            live, previous = 0.0, n + d
            for t in word:
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

    def words(self) -> Words:
        """The present order."""
        n = self.problem.tasks
        found: Words = []
        for t in self.last:
            word = []
            while t < n:
                word.append(t)
                t = self.prev[t]
            found.append(word[::-1])
        return found

    @property
    def makespan(self) -> float:
        """The last end."""
        return max(self.end[t] for t in self.last)

    @property
    def span(self) -> float:
        """The longest device's, from its first start to its last end."""
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
        """The longest path through the moved tasks if all else kept its times (Balas and Vazacopoulos 1998)."""
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
        """Does the device stay within its memory?"""
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
        """Make the move and time everything anew; False (and nothing changed) if it closes a circle."""
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
        """Change order and topological order; the stretch of the latter that changed, or None for a circle."""
        task, passed, left = step
        before, prev, rank = self.before, self.prev, self.rank
        first, final = (rank[passed[0]], rank[task]) if left else (rank[task], rank[passed[-1]])
        stretch = self.topological[first : final + 1]
        # What comes after the tasks that now come later moves behind the ones that now come earlier.
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
