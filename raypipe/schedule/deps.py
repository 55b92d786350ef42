"""The dependency rule and the task graph of a schedule.

``dependencies`` states the rule. ``link`` applies it to a whole schedule: verifier, simulator and drawings use the
resulting ``TaskGraph``. ``transfers`` reads from it which tensors pass between stages: programs, their messages and the
memory that those take follow from these. So there is only one copy of the rule.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from raypipe.errors import ScheduleError
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Backward, Rules, Schedule, StageGraph, Task, backwards, grid
from raypipe.schedule.kinds import (
    BACKWARD,
    BOOKKEEPING,
    BW,
    EXCHANGES,
    GRADIENTS,
    KINDS,
    READS_WEIGHTS,
    WEIGHT_GRADIENTS,
    Kind,
)


class Need(NamedTuple):
    """A task of any of these kinds at this stage."""

    kinds: tuple[Kind, ...]
    stage: int
    along: int = 0
    """For the same micro-batch id (0), or for that of the slice before (-1) or after (1), where there is one."""


_BACKWARD = tuple(kind for kind in KINDS if kind in BACKWARD)
_WEIGHTS = tuple(kind for kind in KINDS if kind in WEIGHT_GRADIENTS)


def dependencies(
    kind: Kind, stage: int, inputs: list[int], outputs: list[int], recomputed: bool, rules: Rules, backward: Backward
) -> list[Need]:
    """Return what must have finished before a task of ``stage`` may start, for each of its micro-batches.

    The backward of a last stage (without outputs) waits only for its own forward. With slices, a forward also waits
    for the keys and values of the slice before, and a backward for their gradients from the slice after. What a stage
    of experts reads comes by its DF, what is read of it by its CF; DB and CB are their counterparts on the way back.

    Args:
        kind: kind of the task, compute or all-to-all.
        stage: its stage.
        inputs: the stages that ``stage`` reads.
        outputs: the stages that read ``stage``.
        recomputed: whether this (stage, micro-batch) has an R task.
        rules: the options of the schedule.
        backward: what the backward of ``stage`` consists of (``ir.backwards``).
    """
    experts = rules.experts
    arrived = [Need(("CF",) if s in experts else ("F",), s) for s in inputs]
    gradient = [Need(("CB",) if s in experts else _BACKWARD, s) for s in outputs]
    if kind in EXCHANGES:
        here = {"CF": Need(("F",), stage), "CB": Need(_BACKWARD, stage)}
        return arrived if kind == "DF" else gradient if kind == "DB" else [here[kind]]
    if stage in experts:
        arrived, gradient = [Need(("DF",), stage)], [Need(("DB",), stage)]
    own = [Need(("R",) if recomputed else ("F",), stage)]
    sliced = rules.slices > 1
    if sliced:  # what computes the gradients of keys and values: W where it runs the whole backward
        gradient.append(Need(_BACKWARD if backward.input_grad else _WEIGHTS, stage, 1))
    if kind == "F":
        return arrived + [Need(("F",), stage, -1)] * sliced
    if kind == "R":
        return [Need(("F",), stage), *(gradient if rules.recompute == "late" else [])]
    if kind in BACKWARD:
        return own + gradient
    if kind == "W":
        if rules.w_dep == "grad" or not backward.input_grad:
            return own + gradient
        return [Need(("B",), stage)]
    return []


Direction = Literal["act", "grad"]
"""An output that a later stage reads, or the gradient of one on its way back."""


class Transfers(NamedTuple):
    """Which tensors tasks take from other stages and give to them, for each of their micro-batches.

    By (kind, stage): pairs of a direction and the other stage. Several tasks may take the same tensor (W and B of one
    micro-batch); it is sent once, for the first of them.
    """

    taken: dict[tuple[Kind, int], tuple[tuple[Direction, int], ...]]
    given: dict[tuple[Kind, int], tuple[tuple[Direction, int], ...]]


@lru_cache(maxsize=256)
def transfers(graph: StageGraph, rules: Rules) -> Transfers:
    """Derive the tensors that pass between stages: whatever a task needs of another stage is one.

    R takes none. Where it waits for the gradient (``Rules.recompute``), that is for the backward that follows.

    >>> transfers(StageGraph.chain(2), Rules()).given
    {('B', 1): (('grad', 0),), ('BW', 1): (('grad', 0),), ('F', 0): (('act', 1),)}
    """
    inputs, outputs = graph.inputs(), graph.outputs()
    taken: dict[tuple[Kind, int], tuple[tuple[Direction, int], ...]] = {}
    given: dict[tuple[Kind, int], dict[tuple[Direction, int], None]] = {}
    for stage, backward in enumerate(backwards(graph, rules)):
        for kind in KINDS:
            if kind != "F" and not (kind in GRADIENTS and backward.exists):
                continue
            own: list[tuple[Direction, int]] = []
            for need in dependencies(kind, stage, inputs[stage], outputs[stage], False, rules, backward):
                if need.stage != stage:
                    direction: Direction = "act" if need.kinds == ("F",) else "grad"
                    own.append((direction, need.stage))
                    for maker in need.kinds:
                        given.setdefault((maker, need.stage), {})[direction, stage] = None
            if own:
                taken[kind, stage] = tuple(own)
    return Transfers(taken, {key: tuple(to) for key, to in given.items()})


@dataclass(slots=True)
class TaskGraph:
    """A schedule with its dependencies resolved; tasks are numbered device by device, in order."""

    schedule: Schedule
    tasks: list[Task]
    device: list[int]
    """Device of each task."""
    first: list[int]
    """Number of each device's first task, followed by the number of tasks."""
    preds: list[list[int]]
    """Per task, the tasks it depends on, without the order of its own device."""
    missing: list[tuple[int, Need, int]]
    """(task, need, micro-batch id of the need) for what no task provides; the schedule is then invalid."""
    doubled: list[tuple[int, int]]
    """Pairs of tasks that do the same work; the schedule is then invalid."""
    joined: frozenset[int] = frozenset()
    """The second halves of pairs; the first half of i is i - 1."""

    def halves(self, i: int) -> tuple[int, ...]:
        """Return the tasks that start together with task ``i``, itself included, in order."""
        if i in self.joined:
            return (i - 1, i)
        return (i, i + 1) if i + 1 in self.joined else (i,)


@no_collection()
def link(schedule: Schedule) -> TaskGraph:
    """Number the tasks of ``schedule`` and resolve all dependencies, in time linear in tasks and edges.

    Raises:
        ScheduleError: a task's stage does not exist.
    """
    tasks: list[Task] = []
    device: list[int] = []
    first = [0]
    for d, order in enumerate(schedule.orders):
        tasks.extend(order)
        device.extend([d] * len(order))
        first.append(len(tasks))
    where: dict[tuple[Kind, int], dict[int, int]] = {}
    doubled: list[tuple[int, int]] = []
    bookkeeping: list[int] = []
    for i, (kind, stage, mbs, _) in enumerate(tasks):
        if not 0 <= stage < schedule.stages:
            at = (device[i], i - first[device[i]])
            raise ScheduleError(
                f"device {at[0]}, position {at[1]}, task {tasks[i]}",
                f"stage {stage} does not exist\n{grid(schedule, at)}",
                f"use 0 to {schedule.stages - 1}",
            )
        if kind in BOOKKEEPING:
            bookkeeping.append(i)
            continue
        done = where.get((kind, stage))
        if done is None:
            done = where[(kind, stage)] = {}
        for mb in mbs:
            if mb in done:
                doubled.append((done[mb], i))
            done[mb] = i
    for stage in range(schedule.stages):  # a B and a BW of one micro-batch do the same work twice
        joint = where.get((BW, stage), {})
        for single in ("B", "W"):
            other = where.get((single, stage), {})
            doubled.extend((joint[mb], other[mb]) for mb in joint.keys() & other.keys())

    rules, backwards = schedule.rules, schedule.backwards
    inputs, outputs = schedule.graph.inputs(), schedule.graph.outputs()
    known: dict[tuple[Kind, int, bool], list[tuple[Need, list[dict[int, int]]]]] = {}
    empty: dict[int, int] = {}
    preds: list[list[int]] = []
    missing: list[tuple[int, Need, int]] = []
    recomputed = [where.get(("R", s), empty) for s in range(schedule.stages)]
    plain: dict[tuple[Kind, int], list[dict[int, int]]] = {}
    """Fast path without recomputation and slices: (kind, stage) -> per need, micro-batch -> what provides it."""
    for i, (kind, stage, mbs, _) in enumerate(tasks):
        if len(mbs) == 1 and rules.slices == 1:  # nearly all tasks of nearly all schedules
            one = plain.get((kind, stage))
            if one is None and not recomputed[stage]:
                rule = dependencies(kind, stage, inputs[stage], outputs[stage], False, rules, backwards[stage])
                one = plain[kind, stage] = [_either(where, need) for need in rule]
            if one is not None:
                (mb,) = mbs
                try:
                    preds.append([source[mb] for source in one])
                    continue
                except KeyError:
                    pass  # reported below
        result: list[int] = []
        for mb in mbs:
            case = (kind, stage, mb in recomputed[stage])
            needs = known.get(case)
            if needs is None:
                rule = dependencies(kind, stage, inputs[stage], outputs[stage], case[2], rules, backwards[stage])
                needs = known[case] = [(n, [where.get((k, n.stage), empty) for k in n.kinds]) for n in rule]
            for need, providers in needs:
                needed = rules.neighbour(mb, need.along) if need.along else mb
                if needed is None:
                    continue
                for provider in providers:
                    source = provider.get(needed)
                    if source is not None:
                        if source not in result:
                            result.append(source)
                        break
                else:
                    missing.append((i, need, needed))
        preds.append(result)
    if bookkeeping:
        _link_bookkeeping(schedule, tasks, bookkeeping, preds)
    if schedule.sharding is not None:
        _link_sharding(schedule, tasks, first, preds)
    joined = frozenset(i for i, task in enumerate(tasks) if task in schedule.joined) if schedule.joined else frozenset()
    return TaskGraph(schedule, tasks, device, first, preds, missing, doubled, joined)


def _either(where: dict[tuple[Kind, int], dict[int, int]], need: Need) -> dict[int, int]:
    """Micro-batch -> the task of the first of the need's kinds that has one."""
    kinds, stage, _ = need
    known = [where[kind, stage] for kind in kinds if (kind, stage) in where]
    if len(known) == 1:
        return known[0]
    merged: dict[int, int] = {}
    for one in reversed(known):
        merged.update(one)
    return merged


def _link_bookkeeping(schedule: Schedule, tasks: list[Task], bookkeeping: list[int], preds: list[list[int]]) -> None:
    """Resolve AR, which waits for the stage's weight gradients on every replica, and U, which waits for AR.

    Without AR, U waits for its own weight gradients. The last weight gradient of a device stands for all of them,
    because a device runs its tasks in order; of a frozen stage, which has statistics at most to sum and update, its
    last task does. Where gradients are reduce-scattered, the last RS stands for them.
    """
    last: dict[int, dict[int, int]] = {}
    reduced: dict[tuple[int, int], int] = {}
    complete = [backward.last | {"RS"} for backward in schedule.backwards]
    for i, task in enumerate(tasks):
        if task.kind in complete[task.stage]:
            last.setdefault(task.stage, {})[task.replica] = i
        elif task.kind == "AR":
            reduced[(task.stage, task.replica)] = i
    for i in bookkeeping:
        task = tasks[i]
        key = (task.stage, task.replica)
        if task.kind == "AR":
            preds[i] = list(last.get(task.stage, {}).values())
        elif task.kind != "U":
            continue
        elif key in reduced:
            preds[i] = [reduced[key]]
        else:
            done = last.get(task.stage, {})
            preds[i] = [done[task.replica]] if task.replica in done else []


def _link_sharding(schedule: Schedule, tasks: list[Task], first: list[int], preds: list[list[int]]) -> None:
    """Resolve AG, RS and FREE, which depend on the order of their own device alone.

    A task that reads weights waits for the last AG of its stage. An RS waits for the last weight gradient of its
    stage. An AG waits for nothing but its place in the order, FREE included, and for the stage's U of the step before.
    From level 2 on, gradients have a full-size buffer from their first weight gradient to the end of their RS. The
    first weight gradient that needs one waits until at most one RS is under way on its device, so that a slow link does
    not fill the memory.
    """
    for begin, end in itertools.pairwise(first):
        gathered: dict[tuple[int, int], int] = {}
        graded: dict[tuple[int, int], int] = {}
        scattering: list[int] = []
        for i in range(begin, end):
            kind, stage, _, replica = tasks[i]
            key = (stage, replica)
            if kind == "AG":
                gathered[key] = i
            elif kind == "FREE":
                gathered.pop(key, None)
            elif kind == "RS":
                preds[i] = [graded.pop(key)] if key in graded else []
                scattering.append(i)
            if kind in READS_WEIGHTS and key in gathered:
                preds[i].append(gathered[key])
            if kind in WEIGHT_GRADIENTS:
                if key not in graded and len(scattering) > 1 and schedule.zero_level(stage) >= 2:
                    preds[i].append(scattering[-2])
                graded[key] = i
