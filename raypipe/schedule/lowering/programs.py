"""Lower a schedule to one program per device: its tasks, with the messages received before and sent after each.

A message is sent right after the task that produces it. Messages on a directed edge are therefore in the order of the
sending device's tasks, and the receiver can post its receives in that order before the step starts. Sends do not block
(the sender keeps a copy until the receiver has taken it) and receivers buffer early messages, so only a cycle between
tasks could deadlock, which ``verify`` excludes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import BACKWARD, WEIGHT_GRADIENTS
from raypipe.schedule.lowering.asynchronous import Part, parts
from raypipe.schedule.lowering.run_ahead import tasks_ahead


class Message(NamedTuple):
    """The tensors of one micro-batch that one stage sends to another; inside a device they are passed by reference."""

    direction: Literal["act", "grad"]
    src_stage: int
    dst_stage: int
    mb: int
    src_device: int
    dst_device: int

    @property
    def local(self) -> bool:
        """Whether both stages are on one device."""
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


class RunAhead(NamedTuple):
    """The head of a program, which may run while the last step's update is pending (``lowering.run_ahead``)."""

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


def programs(schedule: Schedule, drains: bool = True, ahead: bool = False) -> list[Program]:
    """Lower a schedule to one program per device, in time linear in tasks.

    A gradient is received by the first task that needs it: B, BW, or a W that comes before. With ``ahead``, devices may
    begin a step while the last update is pending.
    """
    heads = tasks_ahead(schedule) if ahead else [0] * schedule.devices
    early: list[dict[int, int]] = [{} for _ in schedule.orders]
    inputs, outputs, backwards = schedule.graph.inputs(), schedule.graph.outputs(), schedule.backwards
    frozen: dict[int, Literal["F", "B"]] = {
        s: "B" if b.exists else "F" for s, b in enumerate(backwards) if not b.weight_grad
    }
    arrivals: list[dict[int, list[Message]]] = [{} for _ in schedule.orders]
    lowered: list[tuple[tuple[Action, ...], frozenset[tuple[int, int]], frozenset[tuple[int, int]]]] = []
    for device, order in enumerate(schedule.orders):
        actions: list[Action] = []
        begun: set[tuple[int, int]] = set()  # backwards, by B, BW or W
        weights_first: set[tuple[int, int]] = set()
        recomputed: set[tuple[int, int]] = set()
        for position, task in enumerate(order):
            receives: list[Message] = []
            sends: list[Message] = []
            held, s = schedule.placement[task.replica], task.stage
            for mb in task.mbs:
                if task.kind == "F":
                    receives += [Message("act", p, s, mb, held[p], device) for p in inputs[s]]
                    sends += [Message("act", s, n, mb, device, held[n]) for n in outputs[s]]
                elif task.kind == "R":
                    recomputed.add((s, mb))
                else:
                    if (s, mb) not in begun:
                        begun.add((s, mb))
                        receives += [Message("grad", n, s, mb, held[n], device) for n in outputs[s]]
                        if task.kind == "W":
                            weights_first.add((s, mb))
                    if task.kind in BACKWARD:
                        sends += [Message("grad", s, p, mb, device, held[p]) for p in backwards[s].sends_to]
            actions.append(Action(task, tuple(receives), tuple(sends)))
            for message in sends:
                if not message.local:
                    arrivals[message.dst_device].setdefault(device, []).append(message)
                    if position < heads[device] or schedule.versions == "2bw":
                        at = early[message.dst_device]
                        at[device] = at.get(device, 0) + 1
        with_b = {(t.stage, mb) for t in order if t.kind == "B" for mb in t.mbs}
        lowered.append((tuple(actions), frozenset(recomputed), frozenset(weights_first & with_b)))
    return [
        Program(
            d, actions, {src: tuple(m) for src, m in arrivals[d].items()}, recomputed, weights_first, drains,
            RunAhead(heads[d], early[d]) if ahead else None, ends_at=frozen,
        )
        for d, (actions, recomputed, weights_first) in enumerate(lowered)
    ]  # fmt: skip


def step_programs(schedule: Schedule, ahead: bool = False) -> dict[Part, list[Program]]:
    """Return the programs of each kind of step, one per device; a schedule that flushes has one kind, see ``parts``."""
    return {part: programs(one, drains=part[1], ahead=ahead) for part, one in parts(schedule).items()}


def completed_by(program: Program) -> frozenset[Task]:
    """Return the tasks that complete a stage replica's gradients and that its AR follows at once.

    Parts of such an AR may begin while the task still runs; other ARs may stand between them. In an ``ordered`` program
    they may not, where the task's messages or an inserted receive come in between: that would be another order.
    """
    found: set[Task] = set()
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
            found.add(before.task)
    return frozenset(found)


def edges(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Return the sorted directed pairs of devices that exchange messages; each pair has one channel."""
    pairs: set[tuple[int, int]] = set()
    for held in schedule.placement:
        for src, dst in schedule.graph.edges:
            if held[src] != held[dst]:
                pairs |= {(held[src], held[dst]), (held[dst], held[src])}
    return tuple(sorted(pairs))
