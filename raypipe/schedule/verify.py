"""The verifier checks that a schedule is a complete training step that its devices can run within their budgets."""

from __future__ import annotations

from collections.abc import Iterator

from raypipe.errors import ScheduleError
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.ir import ZERO_LEVELS, Backward, Schedule, Sharding, grid
from raypipe.schedule.kinds import (
    BACKWARD,
    BOOKKEEPING,
    COMPUTE,
    EXCHANGES,
    READS_WEIGHTS,
    SHARDED,
    WEIGHT_GRADIENTS,
    Kind,
)
from raypipe.schedule.live_activations import check_memory, check_versions
from raypipe.schedule.sharding import collectives
from raypipe.schedule.walk import WalkTimes, walk


def verify(schedule: Schedule, memory_limit: float | None = None, version_limit: int | None = None) -> None:
    """Check placement, completeness, dependencies, freedom from deadlock, and the budgets.

    A schedule is complete if every stage runs, for every micro-batch, exactly one F and one BW or one B and one W, as
    far as its backward has them (``ir.backwards``). If one device all-reduces a stage, all with that stage must.

    Args:
        schedule: the schedule to check.
        memory_limit: limit on live activations per device, in units of one stage's.
        version_limit: limit on weight versions per device.

    Raises:
        ScheduleError: a check fails; the first impossible task is marked in the device grid.
    """
    if schedule.microbatches < 1:
        raise ScheduleError("microbatches", "the step has no micro-batches", "use a whole number >= 1")
    _check_placement(schedule)
    _check_edges(schedule)
    _check_frozen(schedule)
    _check_slices(schedule)
    _check_experts(schedule)
    graph = link(schedule)
    _check_tasks(graph)
    check_links(graph)
    _check_complete(graph)
    _check_pairs(graph)
    _check_bookkeeping(graph)
    check_sharding(graph)
    check_ran(graph, walk(graph, [1.0] * len(graph.tasks)))
    if memory_limit is not None:
        check_memory(schedule, memory_limit)
    if version_limit is not None:
        check_versions(schedule, version_limit)


def _check_experts(schedule: Schedule) -> None:
    experts, (copies, together) = schedule.rules.experts, schedule.exchange
    if list(experts) != sorted(set(experts)) or not set(experts) <= set(range(schedule.stages)):
        why = f"{' '.join(map(str, experts))} of {schedule.stages} stages"
        raise ScheduleError("experts", why, "name each once, in ascending order, of those that there are")
    if (
        copies < 1
        or together < 1
        or schedule.replicas % copies
        or schedule.microbatches % copies
        or (copies > 1 and copies % together)
    ):
        why = f"experts divided over {together} of {copies} copies, {schedule.replicas} replicas in all"
        raise ScheduleError("exchange", why, "give a divisor of the copies, and these a divisor of the replicas")
    for task in schedule.tasks():
        if task.kind in EXCHANGES and task.stage not in experts:
            fix = f"name stage {task.stage} among the experts, or remove it"
            raise ScheduleError("experts", f"{task} exchanges tokens of a stage that is not one of experts alone", fix)
        if task.kind == "R" and experts:
            raise ScheduleError("experts", f"{task} would need its tokens sent again", "divide without recomputation")


def _check_slices(schedule: Schedule) -> None:
    """Check that ids make whole micro-batches of slices, each of which runs alone and on one replica."""
    slices, count = schedule.rules.slices, schedule.microbatches
    if slices == 1:
        return
    if slices < 1 or count % slices or schedule.share_of_samples != 1:
        raise ScheduleError(
            "slices",
            f"{slices} slices for {count} ids, each {schedule.size} of a micro-batch",
            f"give k slices, size 1/k and a multiple of k ids, such as {max(1, count // max(1, slices)) * slices}",
        )
    if schedule.versions != "flush":
        raise ScheduleError("slices", f'weight versions ("{schedule.versions}")', "use a synchronous schedule")
    replica_of: dict[int, int] = {}
    for task in schedule.tasks():
        if len(task.mbs) > 1:
            raise ScheduleError("slices", f"{task} carries several ids", "give each slice tasks of its own")
        for mb in task.mbs:
            if replica_of.setdefault(mb // slices, task.replica) != task.replica:
                why = f"{task} is on another replica than other slices of micro-batch {mb // slices}"
                raise ScheduleError("slices", why, "keep the slices of a micro-batch together")


def _check_placement(schedule: Schedule) -> None:
    if not schedule.placement:
        raise ScheduleError("placement", "no replica", "give one list of devices per replica")
    for replica, row in enumerate(schedule.placement):
        if len(row) != schedule.stages:
            raise ScheduleError(
                f"placement of replica {replica}",
                f"{len(row)} devices for {schedule.stages} stages",
                "give one device per stage",
            )
        for stage, device in enumerate(row):
            if not 0 <= device < schedule.devices:
                raise ScheduleError(
                    f"placement of replica {replica}",
                    f"stage {stage} is on device {device}, which does not exist",
                    f"use 0 to {schedule.devices - 1}, or add an order",
                )


def _check_edges(schedule: Schedule) -> None:
    seen: set[tuple[int, int]] = set()
    for a, b in schedule.graph.edges:
        if not 0 <= a < b < schedule.stages:
            raise ScheduleError("edges", f"{a}>{b} does not join two stages", f"use stages 0 to {schedule.stages - 1}")
        if (a, b) in seen:
            raise ScheduleError(
                "edges", f"{a}>{b} is given twice", "keep one: a stage sends its tensors as one message"
            )
        seen.add((a, b))


def _check_frozen(schedule: Schedule) -> None:
    frozen = schedule.rules.frozen
    if list(frozen) != sorted(set(frozen)) or not all(0 <= s < schedule.stages for s in frozen):
        raise ScheduleError(
            "frozen",
            f"{' '.join(map(str, frozen))} of {schedule.stages} stages",
            f"name each once, in ascending order, of 0 to {schedule.stages - 1}",
        )
    if len(frozen) == schedule.stages:
        raise ScheduleError(
            "frozen", "all stages: nothing would be trained", "leave out those that have weights to train"
        )


def _check_tasks(graph: TaskGraph) -> None:
    """Check that tasks name existing stages and micro-batches, on the right device and with one replica each."""
    schedule = graph.schedule
    replicas, count = schedule.replicas, schedule.microbatches
    placement, device = schedule.placement, graph.device
    owner: list[int] = [-1] * count
    for i, (kind, stage, mbs, replica) in enumerate(graph.tasks):
        if not 0 <= replica < replicas:
            raise fault_at(graph, i, f"replica {replica} does not exist", f"use 0 to {replicas - 1}")
        if placement[replica][stage] != device[i]:
            home = placement[replica][stage]
            raise fault_at(graph, i, f"stage {stage} of replica {replica} is on device {home}", f"move it to {home}")
        if kind in BOOKKEEPING:
            if mbs:
                raise fault_at(graph, i, f"{kind} carries micro-batches", "leave them out")
            continue
        if not mbs or (len(mbs) > 1 and len(set(mbs)) < len(mbs)):
            raise fault_at(graph, i, "carries no micro-batch, or one twice", "name each of its micro-batches once")
        for mb in mbs:
            if not 0 <= mb < count:
                raise fault_at(graph, i, f"micro-batch {mb} does not exist", f"use 0 to {count - 1}")
            if owner[mb] != replica:
                if owner[mb] >= 0:
                    raise fault_at(
                        graph, i, f"micro-batch {mb} runs on replica {owner[mb]} too", "use one replica per micro-batch"
                    )
                owner[mb] = replica


def _check_pairs(graph: TaskGraph) -> None:
    """Check that a pair is a forward directly followed by a backward that does not need it."""
    if lost := graph.schedule.joined - {graph.tasks[i] for i in graph.joined}:
        task = min(lost)
        raise ScheduleError("pairs", f"{task} is half of a pair, and no device runs it", "leave it out")
    for i in sorted(graph.joined):
        task, before = graph.tasks[i], i - 1
        if i in graph.first or graph.tasks[before].kind != "F" or task.kind not in BACKWARD:
            why = "a pair is a forward with a B or BW right after it"
            raise fault_at(graph, i, why, f"put a forward before {task}, or leave the | out")
        if before in graph.preds[i]:
            why = f"runs together with {graph.tasks[before]}, and needs it"
            raise fault_at(graph, i, why, "leave the | out, or pair it with another micro-batch's forward")


_COMPLETE: dict[Kind, frozenset[Kind]] = {
    **{"F": frozenset({"F"}), "B": BACKWARD, "W": WEIGHT_GRADIENTS},
    **{kind: frozenset({kind}) for kind in EXCHANGES},
}
"""Each stage runs exactly one task of each of these groups per micro-batch."""


def _check_complete(graph: TaskGraph) -> None:
    """Check that no task is missing; ``check_links`` has checked that none occurs twice."""
    schedule = graph.schedule
    count = schedule.microbatches
    have: dict[Kind, list[int]] = {k: [0] * schedule.stages for k in COMPUTE | EXCHANGES}
    for kind, stage, mbs, _ in graph.tasks:
        if mbs:
            have[kind][stage] += len(mbs)
    for s, backward in enumerate(schedule.backwards):
        wanted = {"F": True, "B": backward.input_grad, "W": backward.weight_grad}
        wanted |= dict.fromkeys(("DF", "CF"), s in schedule.rules.experts)
        wanted |= dict.fromkeys(("DB", "CB"), s in schedule.rules.experts and backward.exists)
        for kind, alike in _COMPLETE.items():
            if wanted[kind] and sum(have[k][s] for k in alike) != count:
                _report_missing(graph, kind, s)
        surplus = set(_surplus(backward))
        if any(have[k][s] for k in surplus):
            i = next(i for i, t in enumerate(graph.tasks) if t.stage == s and t.kind in surplus)
            why = "this stage computes no input gradient (skip_first_B)"
            if not backward.weight_grad:
                none = "weight gradient" if backward.exists else "backward: no stage up to it has a trained parameter"
                why = f"stage {s} is frozen and has no {none}"
            raise fault_at(graph, i, why, "remove it")


def _surplus(backward: Backward) -> Iterator[Kind]:
    """Yield the kinds of task that a stage with this backward cannot have."""
    if not backward.input_grad:
        yield "B"
    if not backward.weight_grad:
        yield from WEIGHT_GRADIENTS
    if not backward.exists:
        yield "R"


def _report_missing(graph: TaskGraph, kind: Kind, stage: int) -> None:
    schedule = graph.schedule
    result = {mb for t in graph.tasks if t.stage == stage and t.kind in _COMPLETE[kind] for mb in t.mbs}
    mb = min(set(range(schedule.microbatches)) - result)
    near = [i for i, t in enumerate(graph.tasks) if t.stage == stage and mb in t.mbs]
    why, fix = f"no device runs {stage}{kind}{mb}", f"add {stage}{kind}{mb} to an order"
    if near:
        raise fault_at(graph, near[-1], f"the step is incomplete: {why}", fix)
    raise ScheduleError("schedule", f"the step is incomplete: {why}\n{grid(schedule)}", fix)


def _check_bookkeeping(graph: TaskGraph) -> None:
    """Check that AR follows its stage's last gradient and RS, U all tasks of its stage, and all replicas have both."""
    schedule = graph.schedule
    last: dict[tuple[int, int, bool], int] = {}
    first: dict[tuple[Kind, int, int], int] = {}
    for i, (kind, stage, _, replica) in enumerate(graph.tasks):
        if kind in SHARDED:
            last[stage, replica, kind == "RS"] = i
        elif kind in BOOKKEEPING:
            if (kind, stage, replica) in first:
                raise fault_at(graph, i, f"a second {kind} of this stage", "keep one")
            first[kind, stage, replica] = i
        else:
            last[stage, replica, kind in WEIGHT_GRADIENTS] = i
    for (kind, stage, replica), i in first.items():
        before = [last.get((stage, replica, True), -1)]
        if kind == "U":
            before += [last.get((stage, replica, False), -1), first.get(("AR", stage, replica), -1)]
        if max(before) > i:
            raise fault_at(graph, i, f"comes before {graph.tasks[max(before)]}, which it needs", "move it after that")
        for other in range(schedule.replicas):
            if (kind, stage, other) not in first:
                raise fault_at(graph, i, f"replica {other} has no {kind} of stage {stage}", "add it, or remove this")


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


def fault_at(graph: TaskGraph, task: int, why: str, fix: str) -> ScheduleError:
    """Return an error that marks one task in the device grid."""
    device = graph.device[task]
    mark = (device, task - graph.first[device])
    where = f"device {device}, position {mark[1]}, task {graph.tasks[task]}"
    return ScheduleError(where, f"{why}\n{grid(graph.schedule, mark)}", fix)


def check_links(graph: TaskGraph) -> None:
    """Check that no task occurs twice and that every dependency is provided by a task.

    Raises:
        ScheduleError: a check fails; the first such task, by position in its device's order, is marked.
    """
    if graph.doubled:
        early, late = min(graph.doubled, key=lambda pair: _position(graph, pair[1]))
        raise fault_at(
            graph, late, f"repeats the work of {graph.tasks[early]} on device {graph.device[early]}", "remove one"
        )
    if graph.missing:
        task, (kinds, stage, _), mb = min(graph.missing, key=lambda m: _position(graph, m[0]))
        needed = " or ".join(f"{stage}{kind}{mb}" for kind in kinds)
        raise fault_at(graph, task, f"waits for {needed}, which no device runs", f"add {needed} to an order")


def check_ran(graph: TaskGraph, done: WalkTimes) -> None:
    """Check that the schedule does not deadlock.

    Raises:
        ScheduleError: devices wait for each other in a cycle; the cycle's earliest task is marked.
    """
    if not done.stuck:
        return
    heads = {graph.device[i]: i for i in reversed(done.stuck)}  # prefer a device's compute task over its all-reduce
    waits: dict[int, int] = {}
    for i in heads.values():
        late = [p for p in graph.preds[i] if done.end[p] < 0]
        if late:
            waits[i] = late[0]
    seen: list[int] = []
    task = min(waits, key=lambda i: _position(graph, i)) if waits else done.stuck[0]
    while task not in seen and task in waits:
        seen.append(task)
        task = heads[graph.device[waits[task]]]
    cycle = seen[seen.index(task) :] if task in seen else [done.stuck[0]]
    first = min(cycle, key=lambda i: _position(graph, i))
    if len(cycle) == 1 and graph.tasks[waits.get(first, first)].kind in EXCHANGES:  # its members have not all come
        first = waits.pop(first, first)
    if first not in waits:
        raise fault_at(
            graph,
            first,
            "waits for the all-reduce of the stage's other devices, which they never reach"
            if graph.tasks[first].kind not in EXCHANGES
            else "waits for the all-to-all of the other members of its expert group, which they never reach",
            "issue the collectives in the same order on every device",
        )
    chain = ", ".join(f"{graph.tasks[i]} waits for {graph.tasks[waits[i]]}" for i in cycle if i in waits)
    raise fault_at(graph, first, f"can never run, the devices wait in a circle: {chain}", "reorder one of these tasks")


def _position(graph: TaskGraph, task: int) -> tuple[int, int]:
    return task - graph.first[graph.device[task]], graph.device[task]
