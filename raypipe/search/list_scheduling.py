"""List scheduling under a memory limit: a free device starts the ready task with the highest priority.

This is the inner loop of the search. It works on flat lists of numbers, without task objects; the next tasks of a
device's lanes are its only queue, because the tasks of a lane run in turn.
"""

from __future__ import annotations

import heapq
from bisect import insort
from dataclasses import dataclass
from typing import Literal, NamedTuple

from raypipe.schedule.ir import backwards
from raypipe.schedule.kinds import BACKWARD
from raypipe.search.memory_safety import Safety
from raypipe.search.problem import DeviceOrders, Problem, lane_order

Reserve = Literal["stages", "safe", "none"]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a free device chooses its next task."""

    key: tuple[float, ...]
    """Per lane; the ready task with the smallest ``key + pace * m`` runs first (m: its number in the lane)."""
    pace: float = 0.0
    """Weight of m: a small one prefers lanes, a large one prefers old micro-batches."""
    patience: tuple[float, ...] = ()
    """Per lane, seconds: stay idle rather than start its task if a task of higher priority arrives within them."""
    ahead: tuple[float, ...] = ()
    """Per lane that allocates memory, how many forwards it may run ahead of its stage's input gradients."""
    reserve: Reserve = "stages"
    """How deadlock is avoided. ``stages`` keeps one activation free for every later stage of the device that will need
    one and holds none. ``safe`` keeps one free only for the stages that a micro-batch in flight has yet to reach, and
    runs the slower check that all micro-batches in flight can finish. ``none`` does nothing."""


class Listed(NamedTuple):
    """An order that list scheduling built."""

    orders: DeviceOrders
    ends: list[float]
    """Per device, when its last task ends."""
    spans: list[float]
    """Per device, from its first start to that end."""

    @property
    def makespan(self) -> float:
        """When the last task of all ends."""
        return max(self.ends)

    @property
    def span(self) -> float:
        """The longest of the devices' spans."""
        return max(self.spans)


@dataclass(slots=True)
class Layout:
    """Tables that list scheduling reads, derived once from a problem."""

    problem: Problem
    group: list[int]
    """Per lane, the number of its (replica, stage)."""
    lead: list[int]
    """Per lane, what its task adds to the number of forwards ahead of backwards: +1 for F; -1 for B or BW, or for W
    where the stage has no B; else 0."""
    later: list[list[int]]
    """Per lane that allocates memory, the allocating lanes of later stages on its device."""
    others: list[list[int]]
    """Per lane that allocates memory, the allocating lanes of all other stages on its device."""
    entry: list[int]
    """Per lane, the first F lane of its replica."""
    near: list[list[int]]
    """Per lane, the lanes of its device that it waits for."""
    in_turn: list[int]
    """All lanes in topological order."""
    needs: list[int]
    """Per task, the number of tasks it waits for."""
    safety: Safety

    @staticmethod
    def of(p: Problem) -> Layout:
        """Derive the tables from a problem."""
        names = sorted({(p.replica[c], p.stage[c]) for c in range(len(p.kind))})
        index = {name: g for g, name in enumerate(names)}
        group = [index[p.replica[c], p.stage[c]] for c in range(len(p.kind))]
        of_stage = backwards(p.graph, p.rules)
        lead = []
        for c in range(len(group)):
            back = of_stage[p.stage[c]]
            ends = p.kind[c] in BACKWARD or (p.kind[c] == "W" and not back.input_grad)
            lead.append(1 if p.kind[c] == "F" and back.exists else -1 if ends else 0)
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
    """Order all tasks, in time proportional to tasks times lanes per device.

    Returns:
        The order, or None on a deadlock: the limits leave every device waiting.
    """
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
    orders: DeviceOrders = [[] for _ in range(p.devices)]
    wake = [0.0] * p.devices
    events = [(0.0, d) for d in range(p.devices)]
    ready = [[c for c in own if count[c] and not need[base[c]]] for own in lanes_of]
    """Per device, the lanes whose next task waits for no other to run."""
    push, pop = heapq.heappush, heapq.heappop
    never = float("inf")
    while events:
        now, d = pop(events)
        if wake[d] != now or free[d] > now:
            continue
        best, best_value, soon, coming = -1, never, never, None
        for c in ready[d]:
            m = nxt[c]
            taken = takes[c]
            if taken:
                room = cap[d] - live[d] - taken + 1e-9
                if room < 0 or (ahead and lead[group[c]] >= ahead[c]):
                    continue
                if reserve == "safe":
                    for e in others[c]:
                        if not held[group[e]] and nxt[e] < nxt[entry[e]]:
                            room -= takes[e]
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
                            room -= takes[e]
                    if room < 0:
                        continue
            value = key[c] + pace * m
            arrival = at[base[c] + m]
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
        t = base[c] + m
        orders[d].append(t)
        if m + 1 == count[c] or need[t + 1]:
            ready[d].remove(c)
        end = now + time[c]
        if begun[d] < 0:
            begun[d] = now
        free[d] = wake[d] = end
        g = group[c]
        live[d] += takes[c] - frees[c]  # nothing else starts on the device before the task ends, so free right away
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
                if nxt[e] == m:
                    insort(ready[o], e)
                arrival = at[t]
                if o != d and free[o] <= arrival < wake[o]:
                    wake[o] = arrival
                    push(events, (arrival, o))
    if nxt != count:
        return None
    return Listed(orders, free, [f - b for f, b in zip(free, begun, strict=True)])
