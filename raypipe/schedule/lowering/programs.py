"""Lower a schedule to one program per device: its tasks, with the messages received before and sent after each.

A message is sent right after the task that produces it. Messages on a directed edge are therefore in the order of the
sending device's tasks, and the receiver can post its receives in that order before the step starts. Sends do not block
(the sender keeps a copy until the receiver has taken it) and receivers buffer early messages, so only a cycle between
tasks could deadlock, which ``verify`` excludes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, NamedTuple

from raypipe.errors import ScheduleError
from raypipe.schedule.deps import Direction, transfers
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import BOOKKEEPING, WEIGHT_GRADIENTS, Kind
from raypipe.schedule.lowering.asynchronous import Part, parts


class Message(NamedTuple):
    """The tensors of one micro-batch that one stage sends to another; inside a device they are passed by reference."""

    direction: Direction
    src_stage: int
    dst_stage: int
    mb: int
    src_device: int
    dst_device: int

    @property
    def local(self) -> bool:
        """True if both stages are on one device."""
        return self.src_device == self.dst_device


class Inserted(NamedTuple):
    """A receive that is issued before the task that needs it, or an all-reduce that is issued later."""

    position: int
    """How many of the action's steps come before it: its receives, its task, its sends."""
    what: Message | Task


class Action(NamedTuple):
    """A task with the messages that it waits for and those that it sends."""

    task: Task
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    inserted: tuple[Inserted, ...] = ()
    """What a GPU issues in between, so that its transfers cannot deadlock (``safe_order``); CPU devices skip it."""
    deferred: bool = False
    """Whether this all-reduce is ``inserted`` in a later action."""
    joined: bool = False
    """Whether it is the second half of a pair."""


class RunAhead(NamedTuple):
    """The head of a program, which may run while the last step's update is pending (``tasks_ahead``)."""

    tasks: int
    """Number of tasks in the head."""
    arrivals: dict[int, int]
    """Per source device, how many of its messages heads may need: those sent by heads, or all of them (2BW)."""


@dataclass(frozen=True, slots=True)
class Program:
    """The actions of one device in one step."""

    device: int
    actions: tuple[Action, ...]
    arrivals: dict[int, tuple[Message, ...]]
    """Per source device, all messages from it, in order."""
    recomputed: frozenset[tuple[int, int]]
    """(stage, micro-batch) pairs whose activations an R recomputes."""
    weights_first: frozenset[tuple[int, int]]
    """(stage, micro-batch) pairs whose W comes before its B (out of order)."""
    drains: bool = True
    """Whether nothing is in flight at its end; an asynchronous program may leave forwards of the next step."""
    ahead: RunAhead | None = None
    """The head that may run ahead; None if an update is committed before the next step begins."""
    ordered: bool = False
    """Whether its transfers have been proven free from deadlock on GPUs in exactly this order (``safe_order``)."""
    unreceived: Mapping[int, int] = field(default_factory=dict)
    """Per destination device, how many messages the host of a GPU lets be unreceived at once (``gpu_programs``)."""
    ends_at: Mapping[int, Literal["F", "B"]] = field(default_factory=dict)
    """Frozen stages: their last task for a micro-batch is its forward, where it has no backward, or B (no W)."""


def programs(schedule: Schedule, drains: bool = True, ahead: bool = False, exchanges: bool = False) -> list[Program]:
    """Lower a schedule to one program per device, in time linear in tasks.

    Messages follow from the dependency rule (``deps.transfers``); the first task that takes a tensor receives it, such
    as a W that comes before its B. With ``ahead``, devices may begin a step while the last update is pending. With
    ``exchanges``, DF, CF, DB and CB may be tasks of their own, which only emulated devices have handlers for.
    """
    if schedule.rules.experts and not exchanges:
        why = "its all-to-all are tasks of their own, which are planned, simulated and emulated, but not run"
        raise ScheduleError(schedule.name, why, "run the schedule that was divided (passes.divide_experts)")
    taken, given = transfers(schedule.graph, schedule.rules)
    heads = tasks_ahead(schedule) if ahead else [0] * schedule.devices
    early: list[dict[int, int]] = [{} for _ in schedule.orders]
    arrivals: list[dict[int, list[Message]]] = [{} for _ in schedule.orders]
    actions: list[list[Action]] = [[] for _ in schedule.orders]
    for device, order in enumerate(schedule.orders):
        received: set[tuple[Direction, int, int, int]] = set()
        for position, task in enumerate(order):
            kind, s, mbs, replica = task
            held = schedule.placement[replica]
            receives: list[Message] = []
            for mb in mbs:
                for way, p in taken.get((kind, s), ()):
                    if (tensor := (way, p, s, mb)) not in received:
                        received.add(tensor)
                        receives.append(Message(*tensor, held[p], device))
            sends = [Message(way, s, n, mb, device, held[n]) for mb in mbs for way, n in given.get((kind, s), ())]
            actions[device].append(Action(task, tuple(receives), tuple(sends), joined=task in schedule.joined))
            for message in sends:
                if not message.local:
                    arrivals[message.dst_device].setdefault(device, []).append(message)
                    if position < heads[device] or schedule.versions == "2bw":
                        at = early[message.dst_device]
                        at[device] = at.get(device, 0) + 1
    ends_at: dict[int, Literal["F", "B"]] = {
        s: "B" if b.exists else "F" for s, b in enumerate(schedule.backwards) if not b.weight_grad
    }
    return [
        Program(
            d,
            tuple(actions[d]),
            {source: tuple(messages) for source, messages in arrivals[d].items()},
            recomputed=frozenset(_pairs(order, "R")),
            weights_first=frozenset(_weights_first(order)),
            drains=drains,
            ahead=RunAhead(heads[d], early[d]) if ahead else None,
            ends_at=ends_at,
        )
        for d, order in enumerate(schedule.orders)
    ]


def _pairs(order: Sequence[Task], kind: Kind) -> Iterator[tuple[int, int]]:
    return ((t.stage, mb) for t in order if t.kind == kind for mb in t.mbs)


def _weights_first(order: Sequence[Task]) -> Iterator[tuple[int, int]]:
    """Yield the (stage, micro-batch) pairs whose B comes after their W."""
    weights_done: set[tuple[int, int]] = set()
    for task in order:
        if task.kind == "W":
            weights_done.update(_pairs((task,), "W"))
        elif task.kind == "B":
            yield from (pair for pair in _pairs((task,), "B") if pair in weights_done)


def step_programs(schedule: Schedule, ahead: bool = False, exchanges: bool = False) -> dict[Part, list[Program]]:
    """Return the programs of each kind of step, one per device; a schedule that flushes has one kind, see ``parts``."""
    return {
        part: programs(one, drains=part[1], ahead=ahead, exchanges=exchanges) for part, one in parts(schedule).items()
    }


def completed_by(program: Program) -> frozenset[Task]:
    """Return the tasks that complete a stage replica's gradients and that its AR follows at once.

    Parts of such an AR may begin while the task still runs; other ARs may stand between them. In an ``ordered`` program
    they may not, where the task's messages or an inserted receive come in between: that would be another order.
    """
    result: set[Task] = set()
    before: Action | None = None
    between = False
    for action in program.actions:
        task = action.task
        if task.kind != "AR":
            before = action
            moved = any(one.position > len(action.receives) for one in action.inserted)
            between = program.ordered and (moved or any(not m.local for m in action.sends))
            continue
        between = between or action.deferred or bool(action.inserted)
        if before is None or between or before.task.kind not in WEIGHT_GRADIENTS:
            continue
        if before.task[1::2] == task[1::2]:
            result.add(before.task)
    return frozenset(result)


def edges(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Return the sorted directed pairs of devices that exchange messages; each pair has one channel."""
    pairs: set[tuple[int, int]] = set()
    for held in schedule.placement:
        for src, dst in schedule.graph.edges:
            if held[src] != held[dst]:
                pairs |= {(held[src], held[dst]), (held[dst], held[src])}
    return tuple(sorted(pairs))


def check_counted(train: Mapping[Part, Sequence[Program]], evaluate: Sequence[Program], schedule: Schedule) -> None:
    """Check that every stage runs each micro-batch's forward and, in training, its last task exactly once.

    That is the weight gradient; in a frozen stage the input gradient, or the forward itself (``ir.backwards``).

    Args:
        train: the programs of a step, one per device, for each way that a step begins and ends.
        evaluate: the programs of a validation batch, one per device.
        schedule: what they were lowered from.

    Raises:
        ScheduleError: a task is left out or runs twice; it names the task.
    """
    count, forward = schedule.microbatches, [frozenset[Kind]({"F"})] * schedule.stages
    last = [backward.last for backward in schedule.backwards]
    _check("validation, the forward", _counted(evaluate, forward), schedule)
    for what, kinds in (("forward", forward), ("last task", last)):
        ran = {part: _counted(rows, kinds) for part, rows in train.items()}
        for (fills, drains), own in ran.items():
            if drains and any(mb >= count for _, mb in own):
                raise ScheduleError("programs", "a step that must drain the pipeline begins the next step", _REPORT)
            # A step that does not fill the pipeline follows one that did not drain it, and ran some of its tasks.
            for before in [Counter()] if fills else [ran[part] for part in ran if not part[1]]:
                early = Counter({(s, mb - count): n for (s, mb), n in before.items() if mb >= count})
                of_step = Counter({(s, mb): n for (s, mb), n in own.items() if mb < count})
                _check(f"a training step, the {what}", of_step + early, schedule)


_REPORT = "this is a bug of raypipe: report it with the plan.json"


def _counted(programs: Sequence[Program], kinds: Sequence[frozenset[Kind]]) -> Counter[tuple[int, int]]:
    """Count how often tasks of these kinds, per stage, run for each (stage, micro-batch)."""
    tasks = (action.task for program in programs for action in program.actions)
    return Counter((task.stage, mb) for task in tasks if task.kind in kinds[task.stage] for mb in task.mbs)


def _check(what: str, ran: Counter[tuple[int, int]], schedule: Schedule) -> None:
    wanted = set(product(range(schedule.stages), range(schedule.microbatches)))
    for stage, mb in sorted(wanted | ran.keys()):
        if ran[stage, mb] != ((stage, mb) in wanted):
            due = "once" if (stage, mb) in wanted else "never"
            why = f"in {what} of micro-batch {mb} on stage {stage} runs {ran[stage, mb]} times instead of {due}"
            raise ScheduleError("programs", why, _REPORT)


# How far a device may run into a step while the update before it is pending.
#
# With clipping by global norm, an update can only be committed once every device's gradients are complete. Meanwhile, a
# synchronous schedule may run the forwards at the head of the next step, and run them again if the update is reverted
# (zero bubble's optimistic step, Qi et al. 2024, section 4). All devices know the set of these forwards, and it is
# closed under dependencies, so that none of them waits for a device that has stopped at the end of its head.
#
# PipeDream-2BW trains step t on the previous version of the weights, so nothing has to run again: all tasks before the
# first forward of step t + 1 may run before the update.


def tasks_ahead(schedule: Schedule) -> list[int]:
    """Return, per device, how many tasks at the head of its order may run while the last step's update is pending.

    The time is linear in these tasks, unless the heads of many devices have to be shortened repeatedly.
    """
    if schedule.versions == "2bw":
        return [_before_newest(schedule, device) for device in range(schedule.devices)]
    counts: list[int] = []
    where: dict[tuple[int, int], tuple[int, int]] = {}  # (stage, micro-batch) -> device and position of its forward
    for device, order in enumerate(schedule.orders):
        count = next((i for i, task in enumerate(order) if task.kind != "F"), len(order))
        where.update({(t.stage, mb): (device, i) for i, t in enumerate(order[:count]) for mb in t.mbs})
        counts.append(count)
    taken = transfers(schedule.graph, schedule.rules).taken

    def misses(stage: int, mb: int) -> bool:
        device, position = where.get((stage, mb), (0, len(schedule.orders[0])))
        return position >= counts[device]

    shortened = True
    while shortened:
        shortened = False
        for device, order in enumerate(schedule.orders):
            for i, task in enumerate(order[: counts[device]]):
                if any(misses(source, mb) for _, source in taken.get(("F", task.stage), ()) for mb in task.mbs):
                    counts[device], shortened = i, True
                    break
    return counts


def _before_newest(schedule: Schedule, device: int) -> int:
    """Return where a device first needs the newest weights, or changes gradients that the last update reads."""
    order = schedule.orders[device]
    for i, task in enumerate(order):
        if task.kind in BOOKKEEPING or (task.kind == "F" and task.mbs[0] >= schedule.microbatches):
            return i
    return len(order)
