"""Move weight gradients into idle time and keep the order of all other tasks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.faults import check_links
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.latency import delays
from raypipe.schedule.live_activations import births, deaths, peak_activations, recomputed_pairs


def insert_weights(
    schedule: Schedule, costs: CostTable, patience: float = 0.5, memory_limit: Sequence[float] | None = None
) -> Schedule:
    """Move every W to where its device would otherwise be idle, the oldest W first.

    ZeroPP postpones all W, simulates the schedule and moves W into the bubbles, repeatedly. Here the bubbles are filled
    during a single simulation. If a forward would exceed a device's memory, a W runs first.

    Args:
        schedule: a schedule without all-reduces and updates; without W it is returned unchanged.
        costs: time of each task.
        patience: leave a device idle rather than start a W that would delay the next task by more than
            ``1 - patience`` of the W's time.
        memory_limit: limit on live activations per device, in units of one stage and full micro-batch; by default
            today's peaks.

    Raises:
        ScheduleError: the schedule cannot run.

    Source: ZeroPP, section 4.
    """
    graph = link(schedule)
    check_links(graph)
    durations = costs.durations(schedule, graph.tasks)
    waits = delays(schedule.placement, schedule.graph, costs.comm)
    recomputed, backwards = recomputed_pairs(schedule), schedule.backwards
    limits = peak_activations(schedule) if memory_limit is None else memory_limit
    size = float(schedule.size)
    fixed = [
        [i for i in range(graph.first[d], graph.first[d + 1]) if graph.tasks[i].kind != "W"]
        for d in range(schedule.devices)
    ]
    needed_by: dict[int, list[int]] = {}
    for i, task in enumerate(graph.tasks):
        if task.kind == "W":
            for p in graph.preds[i]:
                needed_by.setdefault(p, []).append(i)

    end: dict[int, float] = {}
    rows: list[list[Task]] = [[] for _ in range(schedule.devices)]
    alive, position, free = [0] * schedule.devices, [0] * schedule.devices, [0.0] * schedule.devices
    coming: list[list[tuple[float, int]]] = [[] for _ in range(schedule.devices)]  # W tasks by earliest start
    ready: list[list[int]] = [[] for _ in range(schedule.devices)]  # W tasks that can start now, by number
    asleep: dict[int, list[int]] = {}  # task -> devices that wait for it to start
    events = [(0.0, d) for d in range(schedule.devices)]

    def known(i: int) -> float | None:
        """Earliest start of the task, ignoring its device; None if a predecessor has not started yet."""
        at = 0.0
        _, stage, _, replica = graph.tasks[i]
        for p in graph.preds[i]:
            if p not in end:
                return None
            at = max(at, end[p] + (waits[replica][stage][graph.tasks[p].stage] if waits is not None else 0.0))
        return at

    def run(i: int, d: int, now: float) -> None:
        alive[d] += births(graph.tasks[i], recomputed) - deaths(graph.tasks[i], backwards)
        end[i] = free[d] = now + durations[i]
        rows[d].append(graph.tasks[i])
        heapq.heappush(events, (end[i], d))
        for w in needed_by.get(i, ()):
            if (at := known(w)) is not None:
                heapq.heappush(coming[graph.device[w]], (at, w))
                heapq.heappush(events, (at, graph.device[w]))
        for other in asleep.pop(i, ()):
            heapq.heappush(events, (now, other))

    while events:
        now, d = heapq.heappop(events)
        if now < free[d]:
            continue  # the device is busy; the end of its task is another event
        while coming[d] and coming[d][0][0] <= now:
            heapq.heappush(ready[d], heapq.heappop(coming[d])[1])
        following = fixed[d][position[d]] if position[d] < len(fixed[d]) else None
        at = known(following) if following is not None else float("inf")
        full = following is not None and (alive[d] + births(graph.tasks[following], recomputed)) * size > limits[d]
        if ready[d] and (full or at is None or at - now >= patience * durations[ready[d][0]]):
            run(heapq.heappop(ready[d]), d, now)
        elif following is None or full:
            continue  # the arrival of the next W is another event
        elif at is None:
            asleep.setdefault(next(p for p in graph.preds[following] if p not in end), []).append(d)
        elif at > now:
            heapq.heappush(events, (at, d))
        else:
            position[d] += 1
            run(following, d, now)
    return schedule.with_orders(rows)
