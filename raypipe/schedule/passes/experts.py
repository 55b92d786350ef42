"""Divide stages with experts: dispatch and combine become tasks on the network lane of their device.

A stage that holds experts becomes ``2 * parts + 1`` stages of the same device: in turn the layers before, experts, the
layers after. Tokens go to each stage of experts by DF and come back by CF, gradients by DB and CB; the layers after
also read those before (the residual stream). A stage of many expert layers need not have a part for each: a part stands
for several in a row.

What is divided is planned, drawn and simulated. Runs execute the undivided form, with all-to-all inside F and B.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import Comm, CostTable
from raypipe.schedule.ir import Schedule, StageGraph, Task
from raypipe.schedule.kinds import BOOKKEEPING, BW, Kind

TABLES = ("forward", "input_grad", "weight_grad", "all_reduce", "update", "gather", "reduce_scatter")
"""The columns of a cost table that the parts of a stage share."""


def divide_experts(
    schedule: Schedule, costs: CostTable, share: float = 0.5, parts: int = 1
) -> tuple[Schedule, CostTable]:
    """Return the schedule whose all-to-all are tasks, and its costs.

    A backward runs from the last part to the first, and weight gradients that come right after their B, or in a BW,
    follow each part of it: they compute while gradients of tokens travel. The halves of a pair alternate, part by part,
    so that one computes while the other's tokens travel; pairs are gone then.

    Args:
        schedule: a synchronous schedule of single micro-batches, without recomputation, AR, U and shards.
        costs: of its stages; those with ``dispatch`` or ``combine`` are divided.
        share: part of a divided stage's compute that its experts take.
        parts: stages of experts that a stage is divided into.

    Raises:
        ScheduleError: the schedule has a kind of task or micro-batches that cannot be divided, or there is nothing to.
    """
    if parts < 1 or not 0 < share < 1:
        raise ScheduleError(
            "experts", f"{parts} parts, share {share}", "give 1 part or more, and a share between 0 and 1"
        )
    for task in schedule.tasks():
        if task.kind in BOOKKEEPING or task.kind == "R" or len(task.mbs) > 1:
            raise ScheduleError("experts", f"{task} cannot be divided", "divide before sums, updates and recomputation")
    if schedule.versions != "flush" or schedule.rules != replace(schedule.rules, w_dep="B", frozen=(), slices=1):
        raise ScheduleError(
            "experts", "weight versions, frozen stages or slices", "divide a plain synchronous schedule"
        )
    travels = [d + c > 0 for d, c in zip(costs.dispatch, costs.combine, strict=True)]
    if not any(travels):
        raise ScheduleError("experts", "no stage has dispatch or combine", "give costs that have")
    stages: list[range] = []
    for divided in travels:
        first = stages[-1].stop if stages else 0
        stages.append(range(first, first + (2 * parts + 1 if divided else 1)))
    experts = tuple(s for own in stages for s in own[1::2])
    edges = [(a[-1], b[0]) for a, b in ((stages[a], stages[b]) for a, b in schedule.graph.edges)]
    for own in stages:
        edges += [(s, s + 1) for s in own[:-1]] + [(s, s + 2) for s in own[:-2:2]]
    divided_schedule = replace(
        schedule,
        placement=tuple(tuple(row[s] for s, own in enumerate(stages) for _ in own) for row in schedule.placement),
        graph=StageGraph(stages[-1].stop, tuple(sorted(edges))),
        rules=replace(schedule.rules, experts=experts),
        orders=tuple(tuple(_divided(order, schedule.joined, stages)) for order in schedule.orders),
        joined=frozenset(),
    )
    return divided_schedule, _divided_costs(costs, stages, share, edges)


def _divided(order: Sequence[Task], joined: frozenset[Task], stages: Sequence[range]) -> Iterable[Task]:
    """Yield the tasks of a device's order in pieces."""
    k = 0
    while k < len(order):
        task, following = order[k], order[k + 1] if k + 1 < len(order) else None
        if following is not None and following in joined:
            weights = following.kind == BW
            halves = [_pieces(task, stages, False), _pieces(following, stages, weights)]
            for n in range(max(map(len, halves))):
                for half in halves:
                    yield from half[n] if n < len(half) else ()
            k += 2
            continue
        filled = task.kind == "B" and following is not None and following == task._replace(kind="W")
        for piece in _pieces(task, stages, task.kind == BW or filled):
            yield from piece
        k += 1 + filled


def _pieces(task: Task, stages: Sequence[range], weights: bool) -> list[list[Task]]:
    """Return what becomes of a task: per part of its stage, its compute, the all-to-all after it, and its W."""
    own = stages[task.stage]
    forward = task.kind == "F"
    kind: Kind = "B" if task.kind == BW else task.kind
    result: list[list[Task]] = []
    for s in own if forward else reversed(own):
        piece = [task._replace(kind=kind, stage=s)]
        other = s + 1 if forward else s - 1
        if kind != "W" and other in own:
            into = own.index(other) % 2 == 1
            travel: Kind = ("DF" if into else "CF") if forward else ("DB" if into else "CB")
            piece.append(task._replace(kind=travel, stage=other if into else s))
        if weights:
            piece.append(task._replace(kind="W", stage=s))
        result.append(piece)
    return result


def _divided_costs(
    costs: CostTable, stages: Sequence[range], share: float, edges: Iterable[tuple[int, int]]
) -> CostTable:
    old = [stage for stage, own in enumerate(stages) for _ in own]
    result: dict[str, list[float]] = {name: [] for name in (*TABLES, "recompute", "dispatch", "combine")}
    for whole, own in enumerate(stages):
        travel = costs.dispatch[whole] + costs.combine[whole]
        routed, plain = len(own) // 2, len(own) // 2 + 1
        for n in range(len(own)):
            expert = n % 2 == 1
            part = share / routed if expert else (1 - share) / plain if routed else 1.0
            for name in TABLES:
                less = travel if name in ("forward", "input_grad") else 0.0
                result[name].append((getattr(costs, name)[whole] - less) * part)
            result["recompute"].append(0.0)
            result["dispatch"].append(costs.dispatch[whole] / routed if expert else 0.0)
            result["combine"].append(costs.combine[whole] / routed if expert else 0.0)
    comm: Comm = tuple(costs.links[a] * (a != b) for a, b in pairwise([*old, old[-1]]))
    if isinstance(costs.comm, Mapping):
        comm = {(a, b): costs.latency(old[a], old[b]) for a, b in edges}
    columns: dict[str, Any] = {name: tuple(values) for name, values in result.items()}
    return CostTable(comm=comm, **columns)
