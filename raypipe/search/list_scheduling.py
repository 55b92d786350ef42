"""Memory-capped list scheduling: a free device takes the best of its lanes that may start.

The inner loop of the search. It works on flat lists of numbers: no task objects, no queue per device beyond the
heads of its lanes, since a lane's tasks come in turn.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal, NamedTuple

from raypipe.schedule.kinds import BACKWARD
from raypipe.search.memory_safety import Safety
from raypipe.search.problem import Problem, Words, lane_order

Reserve = Literal["stages", "safe", "none"]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a free device chooses."""

    key: tuple[float, ...]
    """Per lane; the ready task with the least ``key + pace * m`` is taken."""
    pace: float = 0.0
    """Weight of a task's number in its lane: small prefers lanes, large prefers old micro-batches."""
    patience: tuple[float, ...] = ()
    """Per lane, stay idle rather than start it if a better task will arrive within this time."""
    ahead: tuple[float, ...] = ()
    """Per lane that takes memory, forwards it may run ahead of the input gradients of its stage."""
    reserve: Reserve = "stages"
    """So that no device jams: ``stages`` keeps one activation free for every later stage of the device that holds none
    but will; ``safe`` only for those that a micro-batch under way is heading for, as long as all that is under way can
    end in some order, which takes longer to find out; ``none`` hopes for the best."""


class Listed(NamedTuple):
    """Words with their length."""

    words: Words
    makespan: float
    span: float


@dataclass(slots=True)
class Layout:
    """What list scheduling reads of a problem, prepared once."""

    problem: Problem
    group: list[int]
    """Per lane, its (stage, replica)."""
    lead: list[int]
    """Per lane, +1 for F, -1 for the lane that ends a forward's lead, else 0."""
    later: list[list[int]]
    """Per lane that takes memory, the later such lanes of its device, which a reserve is for."""
    others: list[list[int]]
    """Per lane that takes memory, all other such lanes of its device."""
    entry: list[int]
    """Per lane, the lane with which its micro-batches begin."""
    near: list[list[int]]
    """Per lane, the lanes of its device that it waits for."""
    in_turn: list[int]
    """Lanes, each after those it waits for."""
    needs: list[int]
    """Per task, tasks it waits for."""
    safety: Safety

    @staticmethod
    def of(p: Problem) -> Layout:
        """Prepare."""
        names = sorted({(p.replica[c], p.stage[c]) for c in range(len(p.kind))})
        index = {name: g for g, name in enumerate(names)}
        group = [index[p.replica[c], p.stage[c]] for c in range(len(p.kind))]
        with_b = {g for c, g in enumerate(group) if p.kind[c] in BACKWARD}
        lead = []
        for c, g in enumerate(group):
            ends = p.kind[c] in BACKWARD or (p.kind[c] == "W" and g not in with_b)
            lead.append(1 if p.kind[c] == "F" else -1 if ends else 0)
        later: list[list[int]] = [[] for _ in group]
        others: list[list[int]] = [[] for _ in group]
        for c, g in enumerate(group):
            if p.takes[c]:
                others[c] = [e for e in p.lanes_of[p.device[c]] if p.takes[e] and group[e] != g]
                later[c] = [e for e in others[c] if group[e] > g]
        begins = {p.replica[c]: c for c in reversed(range(len(group))) if p.kind[c] == "F"}
        entry = [begins[r] for r in p.replica]
        near = [[e for e, _ in p.before[c] if p.device[e] == p.device[c]] for c in range(len(group))]
        needs: list[int] = []
        for c, k in enumerate(p.count):
            needs += [len(p.before[c])] * k
        return Layout(p, group, lead, later, others, entry, near, lane_order(p), needs, Safety(p))


def list_schedule(layout: Layout, setting: Setting) -> Listed | None:
    """Order all tasks; None where limits leave every device waiting. Tasks times lanes of a device."""
    p = layout.problem
    time, count, base, after, device = p.time, p.count, p.base, p.after, p.device
    takes, frees, lanes_of, cap = p.takes, p.frees, p.lanes_of, p.cap
    group, lead_step, later = layout.group, layout.lead, layout.later
    key, pace, patience, ahead, reserve = setting.key, setting.pace, setting.patience, setting.ahead, setting.reserve
    safe, others, entry = layout.safety.safe, layout.others, layout.entry
    need, at = layout.needs[:], [0.0] * p.tasks
    nxt, free, live = [0] * len(count), [0.0] * p.devices, [0.0] * p.devices
    begun = [-1.0] * p.devices
    lead, held = [0] * (max(group) + 1), [0.0] * (max(group) + 1)
    words: Words = [[] for _ in range(p.devices)]
    wake = [0.0] * p.devices
    events = [(0.0, d) for d in range(p.devices)]
    push, pop = heapq.heappush, heapq.heappop
    never = float("inf")
    while events:
        now, d = pop(events)
        if wake[d] != now or free[d] > now:
            continue
        best, best_value, soon, coming = -1, never, never, None
        for c in lanes_of[d]:
            m = nxt[c]
            if m == count[c]:
                continue
            t = base[c] + m
            if need[t]:
                continue
            taken = takes[c]
            if taken:
                room = cap[d] - live[d] - taken + 1e-9
                if room < 0 or (ahead and lead[group[c]] >= ahead[c]):
                    continue
                if reserve == "safe":
                    for e in others[c]:
                        if not held[group[e]] and nxt[e] < nxt[entry[e]]:
                            room -= 1
                    if room < 0:
                        continue
                    nxt[c] += 1
                    live[d] += taken
                    fine = safe(nxt, live)
                    nxt[c] -= 1
                    live[d] -= taken
                    if not fine:
                        continue
                elif reserve == "stages" and later[c]:
                    for e in later[c]:
                        if not held[group[e]] and nxt[e] < count[e]:
                            room -= 1
                    if room < 0:
                        continue
            value = key[c] + pace * m
            arrival = at[t]
            if arrival <= now:
                if value < best_value:
                    best, best_value = c, value
            else:
                if arrival < soon:
                    soon = arrival
                if coming is None:
                    coming = [(arrival, value)]
                else:
                    coming.append((arrival, value))
        if best >= 0 and coming is not None and patience and patience[best]:
            limit = now + patience[best]
            if soon < limit:
                for arrival, value in coming:
                    if value < best_value and arrival < limit:
                        best = -1
                        break
        if best < 0:
            wake[d] = soon
            if soon < never:
                push(events, (soon, d))
            continue
        c = best
        m = nxt[c]
        nxt[c] = m + 1
        words[d].append(base[c] + m)
        end = now + time[c]
        if begun[d] < 0:
            begun[d] = now
        free[d] = wake[d] = end
        g = group[c]
        live[d] += takes[c] - frees[c]  # the device is busy until the end, so when in between is of no matter
        held[g] += takes[c] - frees[c]
        lead[g] += lead_step[c]
        push(events, (end, d))
        for e, lag in after[c]:
            t = base[e] + m
            arrival = end + lag
            if arrival > at[t]:
                at[t] = arrival
            need[t] -= 1
            if not need[t]:
                o = device[e]
                arrival = at[t]
                if o != d and free[o] <= arrival < wake[o]:
                    wake[o] = arrival
                    push(events, (arrival, o))
    if nxt != count:
        return None
    return Listed(words, max(free), max(f - b for f, b in zip(free, begun, strict=True)))
