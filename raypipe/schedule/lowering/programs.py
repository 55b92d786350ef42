"""The transfers pass: from compute orders to what each device receives and sends around every task.

A message goes out right after the task that makes it; so the order of messages on a directed edge is the order of
tasks of the sending device, and the receiver can post its receives in that order before the step starts. Sends
never wait (the sender keeps a copy until the peer takes it) and a receiver keeps what it was sent early, so the
only way to wait for ever is a cycle between tasks, which ``verify`` refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import BACKWARD
from raypipe.schedule.lowering.asynchronous import Part, parts
from raypipe.schedule.lowering.run_ahead import tasks_ahead


class Message(NamedTuple):
    """One tensor list between two stages of one micro-batch; inside one device it is only handed over."""

    direction: Literal["act", "grad"]
    src_stage: int
    dst_stage: int
    mb: int
    src_device: int
    dst_device: int

    @property
    def local(self) -> bool:
        """Both ends are on one device: nothing travels."""
        return self.src_device == self.dst_device


class Action(NamedTuple):
    """A task with the messages it waits for and the messages it causes."""

    task: Task
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]


class RunAhead(NamedTuple):
    """The head of a program: what may run before the last step's update is certain (``schedule.ahead``)."""

    tasks: int
    arrivals: dict[int, int]
    """Per source device, how many of its messages a head may need: those that come from heads, or all (2BW)."""


@dataclass(frozen=True, slots=True)
class Program:
    """What one device does in one step."""

    device: int
    actions: tuple[Action, ...]
    arrivals: dict[int, tuple[Message, ...]]
    """Per source device, every message that will come from it, in order."""
    recomputed: frozenset[tuple[int, int]]
    """(stage, micro-batch) whose activations are computed again by an R."""
    weights_first: frozenset[tuple[int, int]]
    """(stage, micro-batch) whose W comes before its B (out of order)."""
    drains: bool = True
    """Nothing is in flight at its end; an asynchronous step's program may leave the next step's forwards."""
    ahead: RunAhead | None = None
    """None: an update is certain before the next step begins."""


def programs(schedule: Schedule, drains: bool = True, ahead: bool = False) -> list[Program]:
    """Lower a schedule to one program per device; linear in tasks.

    A gradient is received by the first task that needs it: B or BW, or a W that comes before. ``ahead`` lets devices
    run into a step before the last update is certain.
    """
    heads = tasks_ahead(schedule) if ahead else [0] * schedule.devices
    early: list[dict[int, int]] = [{} for _ in schedule.orders]
    inputs, outputs = schedule.graph.inputs(), schedule.graph.outputs()
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
                        sends += [Message("grad", s, p, mb, device, held[p]) for p in inputs[s]]
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
            RunAhead(heads[d], early[d]) if ahead else None,
        )
        for d, (actions, recomputed, weights_first) in enumerate(lowered)
    ]  # fmt: skip


def step_programs(schedule: Schedule, ahead: bool = False) -> dict[Part, list[Program]]:
    """The programs of every kind of step, per device: one kind if the schedule flushes, see ``endless``."""
    return {part: programs(one, drains=part[1], ahead=ahead) for part, one in parts(schedule).items()}


def edges(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Directed device pairs that exchange messages, sorted: one channel each."""
    pairs: set[tuple[int, int]] = set()
    for held in schedule.placement:
        for src, dst in schedule.graph.edges:
            if held[src] != held[dst]:
                pairs |= {(held[src], held[dst]), (held[dst], held[src])}
    return tuple(sorted(pairs))
