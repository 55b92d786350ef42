"""Several steps one after another, message by message, as the program runner walks them.

``simulate`` and ``period`` take messages to have a latency and no more. Here a directed link also carries one message
at a time, which matters where a message takes longer than a task; and every step has its own end, so that a short run
can be held against it, with its fill and its drain.

A link is one more lane of the clock (``schedule.walk``), whose tasks are the messages in the order they are sent.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.asynchronous import WHOLE, Part, parts
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.schedule.lowering.programs import Program, step_programs
from raypipe.schedule.verify import check_links
from raypipe.simulate.period import CyclicGraph, Edges, carried, merge, period, wait_for_norm


def series(
    schedule: Schedule, costs: CostTable, steps: int, occupancy: float = 0.0, norm: NormPolicy = "none"
) -> tuple[float, ...]:
    """When each of ``steps`` steps ends, counted from the start of the first, in the cost table's unit.

    Args:
        schedule: with its gradient sums and updates.
        costs: ``comm`` is a message's latency beside ``occupancy``.
        steps: how many.
        occupancy: time that a message keeps its link for itself; the next one from the same device to the same
            device begins after it.
        norm: what updates have to do with the global gradient norm (``simulate.cyclic``).

    Raises:
        ScheduleError: the schedule cannot run; or ``norm`` is not ``free`` and a device has no update that could wait.
    """
    lowered = step_programs(schedule, exchanges=True)
    sends = (m for way in lowered.values() for program in way for action in program.actions for m in action.sends)
    links = sorted({(m.src_device, m.dst_device) for m in sends if not m.local})
    made = {part: _on_links(one, lowered[part], links) for part, one in parts(schedule).items()}
    check_links(made[WHOLE].graph)
    turns: dict[tuple[Part, Part], CyclicGraph] = {}
    before, end = WHOLE, None
    ends: list[float] = []
    for k in range(steps):
        part = WHOLE if schedule.versions == "flush" else (k == 0, k == steps - 1)
        if (before, part) not in turns:
            turns[before, part] = _turn(made[part], made[before], costs, occupancy, norm)
        end = turns[before, part].turn(end).end
        ends.append(max(end[: made[part].tasks], default=0.0))
        before = part
    return tuple(ends)


SETTLED = 24
"""Steps after which a run of steps has its steady rate."""


def steady(schedule: Schedule, costs: CostTable, occupancy: float = 0.0, norm: NormPolicy = "none") -> float:
    """Time per step in the long run, in the cost table's unit; arguments as ``series``.

    This is ``period`` where that covers everything. For links that carry one message at a time and for the updates of
    asynchronous steps it is the mean of many steps.

    Raises:
        ScheduleError: the schedule cannot run.
    """
    if schedule.versions == "flush" and not occupancy:
        return period(schedule, costs, norm=norm)
    ends = series(schedule, costs, 2 * SETTLED + 1, occupancy, norm)  # the last one drains
    return (ends[-2] - ends[SETTLED - 1]) / SETTLED


@dataclass(slots=True)
class _SeriesStep:
    """The tasks of a step, followed by the messages they send: a link is a lane behind those of the devices."""

    graph: TaskGraph
    tasks: int
    sent: dict[tuple[int, int, int], int]
    """(stage that sends, stage that receives, micro-batch) -> the message between two devices."""


def _on_links(schedule: Schedule, programs: list[Program], links: list[tuple[int, int]]) -> _SeriesStep:
    """Link a step and let what one device needs of another wait for the message instead of the task that sends it.

    A message is a task with its sender's name, so that its receiver waits for the latency between their stages.
    """
    graph = link(schedule)
    count = len(graph.tasks)
    lanes: dict[tuple[int, int], list[tuple[int, tuple[int, int, int]]]] = {edge: [] for edge in links}
    for program, begin in zip(programs, graph.first, strict=False):
        for i, action in enumerate(program.actions, begin):
            for m in action.sends:
                if not m.local:
                    lanes[m.src_device, m.dst_device].append((i, (m.src_stage, m.dst_stage, m.mb)))
    tasks, first, sent = list(graph.tasks), list(graph.first), dict[tuple[int, int, int], int]()
    preds: list[list[int]] = []
    for lane in lanes.values():
        for i, name in lane:
            sent[name] = len(tasks)
            tasks.append(graph.tasks[i])
        first.append(len(tasks))
    for i, needs in enumerate(graph.preds):
        _, stage, mbs, _ = graph.tasks[i]
        if graph.tasks[i].kind == "U" and schedule.versions == "stash":
            preds.append([])  # one after every micro-batch: it follows its own gradient on its device
            continue
        here = [p for p in needs if graph.device[p] == graph.device[i] or not mbs]
        away = [(tasks[p].stage, stage, mb) for p in needs if p not in here for mb in tasks[p].mbs if mb in mbs]
        preds.append(here + [sent[name] for name in away])
    preds += [[i] for lane in lanes.values() for i, _ in lane]
    return _SeriesStep(replace(graph, tasks=tasks, first=first, preds=preds), count, sent)


def _turn(step: _SeriesStep, before: _SeriesStep, costs: CostTable, occupancy: float, norm: NormPolicy) -> CyclicGraph:
    """A step that follows ``before``."""
    graph, schedule = step.graph, step.graph.schedule
    durations = costs.durations(schedule, graph.tasks[: step.tasks])
    durations += [occupancy] * (len(graph.tasks) - step.tasks)
    lag = max(costs.links, default=0.0) + occupancy
    also, after = wait_for_norm(graph, norm, lag, before.graph)
    merge(also, all_reduces_before_updates(graph))
    edges = carried(graph, before.graph)
    merge(edges, after)
    for i, (_, stage, _), mb in graph.missing:  # what an asynchronous step lacks, the step before ran
        task = graph.tasks[i]
        name = (stage, task.stage, mb + schedule.microbatches)
        if name in before.sent:  # else it ran on the same device
            merge(edges, {i: [(before.sent[name], costs.latency(stage, task.stage))]})
    return CyclicGraph(graph, durations, costs.comm, edges, also)


def all_reduces_before_updates(graph: TaskGraph) -> Edges:
    """A runner waits for all its gradient sums before its first update, not only for that update's own."""
    result: Edges = {}
    for first, last in itertools.pairwise(graph.first[: graph.schedule.devices + 1]):
        update = next((i for i in range(first, last) if graph.tasks[i].kind == "U"), first)
        result[update] = [(i, 0.0) for i in range(first, update) if graph.tasks[i].kind in ("AR", "RS")]
    return result
