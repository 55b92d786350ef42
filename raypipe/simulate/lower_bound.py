"""A lower bound on the makespan of any order of a schedule's tasks on its placement."""

from __future__ import annotations

import heapq
from dataclasses import replace

from raypipe.schedule.costs import Comm, CostTable
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import COMPUTE
from raypipe.schedule.passes.backward import split_backward
from raypipe.schedule.verify import check_links, check_ran
from raypipe.schedule.walk import walk

Job = tuple[float, float, float]
"""(head, time, tail): earliest start, time on the machine, least time from its end to the end of the step."""


def lower_bound(schedule: Schedule, costs: CostTable) -> float:
    """No order of these compute tasks on these devices ends earlier, joint backwards split or not.

    One-machine relaxation with heads and tails: each device on its own must run its tasks, each not before what leads
    up to it and leaving time for what follows it elsewhere; the best preemptive order is found exactly by always
    running the task with the longest tail (Jackson's rule; Carlier 1982). All-reduces and updates are left out.

    Args:
        schedule: tasks and placement; which replica a micro-batch runs on is kept.
        costs: time of each task.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    alone = schedule.unpaired()
    rules = replace(schedule.rules, experts=())  # tokens that take no time are there at once
    compute = [[t for t in o if t.kind in COMPUTE] for o in schedule.orders]
    bare = split_backward(alone.with_orders(compute, rules=rules))
    graph = link(bare)
    check_links(graph)
    durations = costs.durations(bare, graph.tasks)
    if schedule.joined:  # whichever backward a forward is paired with, it hides no more than this
        travel = list(map(sum, zip(costs.dispatch, costs.combine, strict=True)))
        hidden = [costs.overlap * min(f, t + max(travel)) for f, t in zip(costs.forward, travel, strict=True)]
        sized = float(schedule.size)
        durations = [
            max(0.0, time - hidden[task.stage] * len(task.mbs) * sized) if task.kind == "F" else time
            for task, time in zip(graph.tasks, durations, strict=True)
        ]
    check_ran(graph, walk(graph, durations, costs.comm))
    heads, tails = _heads_and_tails(graph, durations, costs.comm)
    best = 0.0
    for d in range(bare.devices):
        own = range(graph.first[d], graph.first[d + 1])
        best = max(best, one_machine([(heads[i], durations[i], tails[i]) for i in own]))
    return best


def _heads_and_tails(graph: TaskGraph, durations: list[float], comm: Comm) -> tuple[list[float], list[float]]:
    """Longest paths to and from each task, devices unlimited: every task is a lane of its own.

    A message takes as long in either direction, so tails are the heads of the graph that runs backwards.
    """
    lanes = list(range(len(graph.tasks) + 1))
    after: list[list[int]] = [[] for _ in graph.tasks]
    for i, needs in enumerate(graph.preds):
        for p in needs:
            after[p].append(i)
    there, back = replace(graph, first=lanes), replace(graph, first=lanes, preds=after)
    return walk(there, durations, comm).start, walk(back, durations, comm).start


def one_machine(jobs: list[Job]) -> float:
    """Makespan of the best preemptive order on one machine.

    >>> one_machine([(0, 2, 5), (1, 1, 9)])
    11
    >>> one_machine([(0, 1, 0), (4, 2, 1)])
    7
    """
    waiting = sorted(jobs)
    ready: list[list[float]] = []
    now: float = 0
    end: float = 0
    k = 0
    while k < len(waiting) or ready:
        if not ready:
            now = max(now, waiting[k][0])
        while k < len(waiting) and waiting[k][0] <= now:
            heapq.heappush(ready, [-waiting[k][2], waiting[k][1]])
            k += 1
        job = ready[0]
        until = now + job[1]
        if k < len(waiting) and waiting[k][0] < until:  # interrupted: a longer tail may arrive
            job[1] = until - waiting[k][0]
            now = waiting[k][0]
            continue
        heapq.heappop(ready)
        now = until
        end = max(end, now - job[0])
    return end
