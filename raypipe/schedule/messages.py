"""The transfers pass: from compute orders to what each device receives and sends around every task.

A message goes out right after the task that makes it; so the order of messages on a directed edge is the order of
tasks of the sending device, and the receiver can post its receives in that order before the step starts. Sends
never wait (the sender keeps a copy until the peer takes it) and a receiver keeps what it was sent early, so the
only way to wait for ever is a cycle between tasks, which ``verify`` refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from raypipe.schedule.ir import BACKWARD, Schedule, Task


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


@dataclass(frozen=True, slots=True)
class Program:
    """What one device does in one step."""

    device: int
    actions: tuple[Action, ...]
    arrivals: dict[int, tuple[Message, ...]]
    """Per source device, every message that will come from it, in order."""


def programs(schedule: Schedule) -> list[Program]:
    """Lower a schedule to one program per device; linear in tasks."""
    inputs, outputs = schedule.graph.inputs(), schedule.graph.outputs()
    arrivals: list[dict[int, list[Message]]] = [{} for _ in schedule.orders]
    actions: list[list[Action]] = [[] for _ in schedule.orders]
    for device, order in enumerate(schedule.orders):
        for task in order:
            receives: tuple[Message, ...] = ()
            sends: tuple[Message, ...] = ()
            held = schedule.placement[task.replica]
            s = task.stage
            if task.kind == "F":
                receives = tuple(Message("act", p, s, mb, held[p], device) for mb in task.mbs for p in inputs[s])
                sends = tuple(Message("act", s, n, mb, device, held[n]) for mb in task.mbs for n in outputs[s])
            elif task.kind in BACKWARD:
                receives = tuple(Message("grad", n, s, mb, held[n], device) for mb in task.mbs for n in outputs[s])
                sends = tuple(Message("grad", s, p, mb, device, held[p]) for mb in task.mbs for p in inputs[s])
            elif task.kind == "W" and schedule.rules.skip_first_b and not inputs[s]:
                receives = tuple(Message("grad", n, s, mb, held[n], device) for mb in task.mbs for n in outputs[s])
            actions[device].append(Action(task, receives, sends))
            for message in sends:
                if not message.local:
                    arrivals[message.dst_device].setdefault(device, []).append(message)
    return [
        Program(d, tuple(actions[d]), {src: tuple(m) for src, m in arrivals[d].items()})
        for d in range(schedule.devices)
    ]


def edges(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Directed device pairs that exchange messages, sorted: one channel each."""
    pairs: set[tuple[int, int]] = set()
    for held in schedule.placement:
        for src, dst in schedule.graph.edges:
            if held[src] != held[dst]:
                pairs |= {(held[src], held[dst]), (held[dst], held[src])}
    return tuple(sorted(pairs))
