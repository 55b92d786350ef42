"""List scheduling, decoding and deadlock avoidance in plain Python, as the kernels are held against."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.schedule.ir import backwards
from raypipe.schedule.kinds import BACKWARD
from raypipe.search.list_scheduling import Listed, Setting
from raypipe.search.problem import DeviceOrders, Problem


class Safety:
    """What the micro-batches of one problem hold and still claim, derived from how far each lane has run."""

    def __init__(self, p: Problem) -> None:
        self.devices, self.cap, self.replicas = p.devices, p.cap, len(p.placement)
        last = [backward.last for backward in backwards(p.graph, p.rules)]
        self.firsts: list[list[int]] = [[] for _ in p.placement]
        """Per replica, the lanes that begin a stage (F)."""
        self.lasts: list[list[int]] = [[] for _ in p.placement]
        """Per replica, the lanes that end a stage: W or BW, and B or F where it is frozen."""
        self.claims: list[list[tuple[int, int, float, bool]]] = [[] for _ in p.placement]
        """Per replica: device, allocating lane, activations allocated, and whether they are there for one task only: R,
        or F of a stage without a backward."""
        self.frees: list[list[tuple[int, int, float]]] = [[] for _ in p.placement]
        """Per replica: device, freeing lane, activations freed."""
        for c, replica in enumerate(p.replica):
            if p.kind[c] == "F":
                self.firsts[replica].append(c)
            if p.kind[c] in last[p.stage[c]]:
                self.lasts[replica].append(c)
            if p.takes[c]:
                self.claims[replica].append((p.device[c], c, p.takes[c], p.kind[c] == "R" or p.frees[c] > 0))
            if p.frees[c]:
                self.frees[replica].append((p.device[c], c, p.frees[c]))

    def safe(self, done: list[int], live: list[float]) -> bool:
        """Return whether some order lets every micro-batch in flight finish within memory.

        Args:
            done: per lane, tasks that were started.
            live: per device, live activations.
        """
        left = [cap - used + 1e-9 for cap, used in zip(self.cap, live, strict=True)]
        in_flight = [
            list(range(min(done[c] for c in lasts), max(done[c] for c in firsts)))
            for firsts, lasts in zip(self.firsts, self.lasts, strict=True)
        ]
        stuck = 0
        r = 0
        place = [0] * self.replicas
        while stuck < self.replicas:
            m = in_flight[r][place[r]] if place[r] < len(in_flight[r]) else -1
            if m >= 0 and self._fits(r, m, done, left):
                for d, c, amount, _ in self.claims[r]:
                    if m < done[c]:
                        left[d] += amount
                for d, c, amount in self.frees[r]:
                    if m < done[c]:
                        left[d] -= amount
                place[r] += 1
                stuck = 0
            else:
                stuck += 1
                r = (r + 1) % self.replicas
        return all(k == len(row) for k, row in zip(place, in_flight, strict=True))

    def _fits(self, r: int, m: int, done: list[int], left: list[float]) -> bool:
        """Whether the remaining claims of micro-batch ``m`` of replica ``r`` fit; it recomputes one stage at a time."""
        need: dict[int, float] = {}
        brief: dict[int, float] = {}
        for d, c, amount, briefly in self.claims[r]:
            if m >= done[c]:
                if briefly:
                    brief[d] = max(brief.get(d, 0.0), amount)
                else:
                    need[d] = need.get(d, 0.0) + amount
        return all(need.get(d, 0.0) + brief.get(d, 0.0) <= left[d] for d in {*need, *brief})


@dataclass(slots=True)
class Tables:
    """What the two read, derived once from a problem."""

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
    needs: list[int]
    """Per task, the number of tasks it waits for."""
    safety: Safety

    @staticmethod
    def of(p: Problem) -> Tables:
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
        return Tables(p, group, lead, later, others, entry, near, needs, Safety(p))


def list_schedule(layout: Tables, setting: Setting) -> Listed | None:
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
                    was = live[d]
                    nxt[c], live[d] = m + 1, was + taken
                    fine = safe(nxt, live)
                    nxt[c], live[d] = m, was
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
    return Listed(orders, free, [f - max(0.0, b) for f, b in zip(free, begun, strict=True)])


def decode(layout: Tables, wish: Sequence[float], patience: float) -> DeviceOrders | None:
    """Run tasks in the order of their desired start times, as far as dependencies and memory allow.

    Args:
        layout: the problem.
        wish: desired start per task, ascending within each lane.
        patience: a free device stays idle, rather than start a ready task, if another task that is not ready yet has
            a desired start earlier by more than this.

    Returns:
        The order, or None on a deadlock: every device waits for memory.
    """
    p = layout.problem
    time, count, base, after, device = p.time, p.count, p.base, p.after, p.device
    takes, frees, lanes_of, cap = p.takes, p.frees, p.lanes_of, p.cap
    safe = layout.safety.safe if any(layout.others) else None
    need, at = layout.needs[:], [0.0] * p.tasks
    nxt, free, live = [0] * len(count), [0.0] * p.devices, [0.0] * p.devices
    orders: DeviceOrders = [[] for _ in range(p.devices)]
    wake = [0.0] * p.devices
    events = [(0.0, d) for d in range(p.devices)]
    push, pop = heapq.heappush, heapq.heappop
    never = float("inf")
    near = layout.near
    while events or nxt != count:
        if not events:  # every device idles for a task that waits for memory: no longer be patient
            if patience == never:
                return None
            patience, now = never, max(free)
            events = [(now, d) for d in range(p.devices)]
            free, wake = [now] * p.devices, [now] * p.devices
        now, d = pop(events)
        if wake[d] != now or free[d] > now:
            continue
        best, value, soon, wanted = -1, never, never, never
        for c in lanes_of[d]:
            m = nxt[c]
            if m == count[c]:
                continue
            t = base[c] + m
            taken = takes[c]
            if taken and live[d] + taken > cap[d] + 1e-9:
                continue
            if need[t]:
                if wish[t] < wanted and all(nxt[e] > m for e in near[c]):
                    wanted = wish[t]
                continue
            if at[t] > now:
                soon = min(soon, at[t])
                wanted = min(wanted, wish[t])
            elif wish[t] < value:
                if taken and safe is not None:
                    was = live[d]
                    nxt[c], live[d] = m + 1, was + taken
                    fine = safe(nxt, live)
                    nxt[c], live[d] = m, was
                    if not fine:
                        continue
                best, value = c, wish[t]
        if best >= 0 and wanted < value - patience:
            best = -1
        if best < 0:
            wake[d] = soon
            if soon < never:
                push(events, (soon, d))
            continue
        c = best
        m = nxt[c]
        nxt[c] = m + 1
        orders[d].append(base[c] + m)
        end = now + time[c]
        free[d] = wake[d] = end
        live[d] += takes[c] - frees[c]
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
    return orders
