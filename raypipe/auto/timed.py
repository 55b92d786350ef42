"""An order of all tasks with its times, kept up to date while tasks move along their device.

Heads and tails of every task (the longest paths to and from it) and one topological order. A move touches one stretch
of that order: tasks before it keep their heads, tasks after it their tails.
"""

from __future__ import annotations

from typing import NamedTuple

from raypipe.auto.problem import Problem, Words


class Move(NamedTuple):
    """Put ``task`` right before or right after another task of its device, past those in between."""

    task: int
    passed: list[int]
    """In device order; all before ``task`` (it moves left) or all after it (it moves right)."""
    left: bool


class Timed:
    """The order and its times; index ``tasks`` is a sentinel without time before and after every device's word."""

    def __init__(self, p: Problem) -> None:
        self.problem = p
        n = p.tasks
        self.lane = p.lane
        self.time = [p.time[c] for c in p.lane] + [0.0]
        self.before: list[tuple[tuple[int, float], ...]] = []
        self.after: list[tuple[tuple[int, float], ...]] = []
        for t, c in enumerate(p.lane):
            m = t - p.base[c]
            self.before.append(tuple((p.base[e] + m, lag) for e, lag in p.before[c]))
            self.after.append(tuple((p.base[e] + m, lag) for e, lag in p.after[c]))
        self.prev, self.next = [n] * (n + 1), [n] * (n + 1)
        self.end, self.rest = [0.0] * (n + 1), [0.0] * (n + 1)
        """End of each task; time from its start to the end of the step."""
        self.live = [0.0] * n
        """Activations its device holds just before a task starts."""
        self.topological: list[int] = []
        self.rank = [0] * (n + 1)
        self.last: list[int] = [n] * p.devices
        self.makespan = 0.0
        self.limited = any(cap != float("inf") for cap in p.cap)

    def load(self, words: Words) -> None:
        """Take over an order that can run."""
        p, n = self.problem, self.problem.tasks
        waits = [len(b) for b in self.before]
        for d, word in enumerate(words):
            live, previous = 0.0, n
            for t in word:
                self.prev[t] = previous
                if previous != n:
                    self.next[previous] = t
                    waits[t] += 1
                self.live[t] = live
                live += p.takes[p.lane[t]] - p.frees[p.lane[t]]
                previous = t
            if previous != n:
                self.next[previous] = n
            self.last[d] = previous
        ready = [t for t, w in enumerate(waits) if not w]
        for t in ready:
            follow = self.next[t]
            if follow != n:
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
            while t != n:
                word.append(t)
                t = self.prev[t]
            found.append(word[::-1])
        return found

    def _heads(self, first: int) -> None:
        prev, before, end, time = self.prev, self.before, self.end, self.time
        for t in self.topological[first:]:
            at = end[prev[t]]
            for q, lag in before[t]:
                ready = end[q] + lag
                if ready > at:
                    at = ready
            end[t] = at + time[t]
        self.makespan = max(end[t] for t in self.last)

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
        task, passed, left = move
        row = [task, *passed] if left else [*passed, task]
        outer = self.prev[passed[0] if left else task]
        at = self.end[outer]
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
        back = rest[self.next[task if left else passed[-1]]]
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

    def allowed(self, task: int, other: int, left: bool) -> bool:
        """May ``task`` pass ``other``, as far as lanes and direct dependencies go?"""
        if self.lane[task] == self.lane[other]:
            return False
        first, second = (other, task) if left else (task, other)
        return all(q != first for q, _ in self.before[second])

    def fits(self, move: Move) -> bool:
        """Does the device stay within its memory?"""
        if not self.limited:
            return True
        p = self.problem
        task, passed, left = move
        row = [task, *passed] if left else [*passed, task]
        live = self.live[passed[0] if left else task]
        cap = p.cap[p.device[self.lane[task]]] + 1e-9
        for t in row:
            c = self.lane[t]
            live += p.takes[c]
            if live > cap:
                return False
            live -= p.frees[c]
        return True

    def apply(self, move: Move) -> bool:
        """Make the move and time everything anew; False (and nothing changed) if it closes a circle."""
        task, passed, left = move
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
                        return False
                    behind.add(t)
                    late.append(t)
                    break
            else:
                early.append(t)
        self._relink(task, passed, left)
        self.topological[first : final + 1] = early + late
        for k, t in enumerate(early + late, first):
            rank[t] = k
        self._heads(first)
        self._tails(final)
        return True

    def _relink(self, task: int, passed: list[int], left: bool) -> None:
        p, n, prev, follow = self.problem, self.problem.tasks, self.prev, self.next
        row = [task, *passed] if left else [*passed, task]
        outer = prev[passed[0] if left else task]
        beyond = follow[task if left else passed[-1]]
        live = self.live[passed[0] if left else task]
        previous = outer
        for t in row:
            prev[t] = previous
            if previous != n:
                follow[previous] = t
            self.live[t] = live
            live += p.takes[p.lane[t]] - p.frees[p.lane[t]]
            previous = t
        follow[previous] = beyond
        if beyond != n:
            prev[beyond] = previous
        else:
            self.last[p.device[p.lane[task]]] = previous
