"""The verifier's part for sharded data parallelism: no task reads weights that are not there, no gradient gets lost."""

from __future__ import annotations

from raypipe.errors import ScheduleError
from raypipe.schedule.deps import TaskGraph
from raypipe.schedule.faults import fault_at
from raypipe.schedule.ir import ZERO_LEVELS, Schedule, Sharding
from raypipe.schedule.kinds import READS_WEIGHTS, SHARDED, WEIGHT_GRADIENTS
from raypipe.schedule.sharding.collectives import collectives

_Key = tuple[int, int]
"""(stage, replica)"""


def check_sharding(graph: TaskGraph) -> None:
    """Check the AG, RS and FREE tasks of a schedule against its ``sharding``.

    No task computes on a resharded stage; every AG of level 3 is matched by one FREE before the next; levels 1 and 2
    gather once and never reshard; every weight gradient is followed by an RS, and U comes after all of these; and the
    members of a shard group issue the same collectives in the same order, which copies of one order do.

    Raises:
        ScheduleError: a check fails; the task is marked in the device grid.
    """
    schedule = graph.schedule
    if schedule.sharding is None:
        for i, task in enumerate(graph.tasks):
            if task.kind in SHARDED:
                raise fault_at(
                    graph,
                    i,
                    f"the schedule is not sharded, so it has no use for {task.kind}",
                    "state the ZeRO level of every stage, or remove it",
                )
        return
    _check_levels(schedule, schedule.sharding)
    for d in range(schedule.devices):
        _check_device(graph, d)
    _check_groups(graph)


def _check_levels(schedule: Schedule, sharding: Sharding) -> None:
    if len(sharding.levels) != schedule.stages or not set(sharding.levels) <= set(ZERO_LEVELS):
        raise ScheduleError(
            "zero", f"levels {sharding.levels} for {schedule.stages} stages", "give one of 0 to 3 per stage"
        )
    copies, group = sharding.copies, sharding.group
    if copies < 1 or schedule.replicas % copies:
        raise ScheduleError("zero", f"{copies} copies in {schedule.replicas} replicas", "use a divisor of the replicas")
    if group is not None and (group < 1 or (copies > 1 and copies % group)):
        raise ScheduleError("zero", f"shard groups of {group} among {copies} copies", "use a divisor of the copies")
    if schedule.versions != "flush":
        raise ScheduleError(
            "zero",
            f"{schedule.name} keeps older versions of its weights, which shards do not have",
            "use a synchronous schedule, or zero: 0",
        )


def _check_device(graph: TaskGraph, device: int) -> None:
    """Play one device's order and follow the state of each stage replica."""
    schedule = graph.schedule
    gathered: dict[_Key, int | None] = {}  # its AG, until a task has read the weights: None
    seen: set[_Key] = set()
    graded: dict[_Key, int] = {}  # weight gradients that no RS has taken yet
    scattered: set[_Key] = set()
    for i in range(graph.first[device], graph.first[device + 1]):
        kind, stage, _, replica = graph.tasks[i]
        level, key = schedule.zero_level(stage), (stage, replica)
        if level == 0 and kind not in SHARDED:
            continue
        if kind in SHARDED and level < (3 if kind == "FREE" else 1):
            raise fault_at(graph, i, f"stage {stage} has ZeRO level {level}", f"remove {kind}, or raise the level")
        if kind in READS_WEIGHTS and key not in gathered:
            raise fault_at(graph, i, f"the weights of stage {stage} are sharded here", f"put {stage}AG before it")
        if kind in READS_WEIGHTS:
            gathered[key] = None
        if kind in WEIGHT_GRADIENTS:
            graded[key] = i
        elif kind == "AG":
            if key in gathered:
                raise fault_at(graph, i, f"stage {stage} is gathered already", "put FREE before it, or remove it")
            gathered[key] = i
            seen.add(key)
        elif kind == "FREE":
            if gathered.get(key, i) is not None:  # not gathered, or gathered for nothing
                raise fault_at(graph, i, "no task has read the weights that it frees", "remove it and its AG")
            del gathered[key]
        elif kind == "RS":
            if key not in graded and key in scattered:
                raise fault_at(graph, i, f"stage {stage} has no gradients since its last RS", "remove it")
            graded.pop(key, None)
            scattered.add(key)
        elif kind == "U" and (key in graded or key not in scattered or (level == 3 and key in gathered)):
            why = "is still gathered" if key not in graded and key in scattered else "has gradients without an RS"
            raise fault_at(graph, i, f"stage {stage} {why}", f"put {stage}{'FREE' if 'still' in why else 'RS'} before")
    for key, i in graded.items():
        raise fault_at(graph, i, f"its gradients are never reduce-scattered (stage {key[0]})", f"add {key[0]}RS")
    for key in gathered:
        if schedule.zero_level(key[0]) == 3:
            raise ScheduleError(f"device {device}", f"stage {key[0]} stays gathered", f"end with {key[0]}FREE")


def _check_groups(graph: TaskGraph) -> None:
    """Check that the members of every shard group issue the same collectives in the same order."""
    schedule, sharding = graph.schedule, graph.schedule.sharding
    if sharding is None or sharding.copies == 1:
        return
    rows: list[list[tuple[object, ...]]] = [[] for _ in range(schedule.devices)]
    of_copy = schedule.replicas // sharding.copies
    for i, (kind, stage, (row, _), n) in collectives(graph).items():
        rows[graph.device[i]].append((kind, stage, graph.tasks[i].replica % of_copy if kind == "AR" else row, n))
    for replica, held in enumerate(schedule.placement):
        row, number = sharding.group_of(replica, schedule.replicas)
        first = number * (sharding.group or sharding.copies) * of_copy + row
        for stage, device in enumerate(held):
            twin = schedule.placement[first][stage]
            if rows[device] != rows[twin]:
                raise ScheduleError(
                    f"device {device}",
                    f"issues other collectives than device {twin}, its shard group's first member",
                    "give data-parallel copies the same order (passes.replicate)",
                )
