"""The exact bound on messages in flight: what the quick ones of raypipe are held against.

``sent``     After a device's task i, when all other devices have done only what i depends on.
``arriving`` Before a device's task j, when all other devices have done everything that does not depend on j.

Both moments are reached by some execution, so the bounds are tight for a transport that delivers at once (``arriving``)
or not before the message is used (``sent``). A GPU that receives over NCCL allocates a message when it issues its
receive, which the program decides and not the sender: there ``issued`` bounds the receiver's part instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from raypipe.schedule.lowering.programs import Message, Program
from raypipe.schedule.lowering.safe_order import issued as issued_by


class InFlight(NamedTuple):
    """The most that one device can hold of messages at once, in the unit of ``size``."""

    sent: float
    """Messages that it has sent and that nobody has used yet."""
    arriving: float
    """Messages that it has been sent and has not used yet."""
    issued: float
    """Messages whose receive it has issued on a GPU and that it has not used yet."""


def messages_in_flight(programs: Sequence[Program], size: Callable[[Message], float] = lambda _: 1.0) -> list[InFlight]:
    """Return the most that each device can hold of a step's messages at once, over all executions.

    Time and space grow as tasks times devices.

    Args:
        programs: of all devices, of a step that drains.
        size: bytes of a message; by default messages are counted.
    """
    ways = flights(programs)
    before = ancestors(programs, ways)
    # Per device and task, by how much the bytes in flight change there.
    sent, arriving = ([[0.0] * (len(p.actions) + 1) for p in programs] for _ in range(2))
    for m, producer, consumer in ways:
        src, dst = m.src_device, m.dst_device
        # Until a task of the sender that depends on the consumer.
        until = bisect_right(before[src], consumer, key=lambda row, dst=dst: row[dst])  # type: ignore[misc]
        sent[src][producer] += size(m)
        sent[src][until] -= size(m)
        # From the first task of the receiver that the producer does not depend on.
        arriving[dst][before[src][producer][dst]] += size(m)
        arriving[dst][consumer + 1] -= size(m)
    return [
        InFlight(max(accumulate(sent[d])), max(accumulate(arriving[d])), _issued(program, size))
        for d, program in enumerate(programs)
    ]


def _issued(program: Program, size: Callable[[Message], float]) -> float:
    """The most that receives issued and not yet used take; those of a channel are issued in the order of sending."""
    line = {source: deque(messages) for source, messages in program.arrivals.items()}
    here: set[Message] = set()
    most = held = 0.0
    for action in program.actions:
        for _, what in issued_by(action):
            if not isinstance(what, Message) or what.local or what.dst_device != program.device:
                continue
            while what not in here:
                first = line[what.src_device].popleft()
                here.add(first)
                held += size(first)
        most = max(most, held)
        held -= sum(size(m) for m in action.receives if not m.local)
    return most


class Flight(NamedTuple):
    """A message with the tasks that send and use it, by position in their devices' programs."""

    message: Message
    producer: int
    consumer: int


def flights(programs: Sequence[Program]) -> list[Flight]:
    """Return the messages between devices with the tasks that send and use them."""
    used: dict[Message, int] = {}
    for program in programs:
        for j, action in enumerate(program.actions):
            for m in action.receives:
                used.setdefault(m, j)
    return [
        Flight(m, i, used[m])
        for program in programs
        for i, action in enumerate(program.actions)
        for m in action.sends
        if not m.local
    ]


def ancestors(programs: Sequence[Program], ways: Sequence[Flight]) -> list[list[list[int]]]:
    """Return, per device, task and other device, how many of that one's tasks have to be done before the task has run.

    All-reduces make nothing but updates wait, and are left out.
    """
    producer = {way.message: way.producer for way in ways}
    clocks: list[list[list[int]]] = [[] for _ in programs]
    moved = True
    while moved:
        moved = False
        for d, program in enumerate(programs):
            while len(clocks[d]) < len(program.actions):
                position = len(clocks[d])
                needs = [(m.src_device, producer[m]) for m in program.actions[position].receives if not m.local]
                if any(len(clocks[e]) <= i for e, i in needs):
                    break
                rows = [clocks[e][i] for e, i in needs] + (clocks[d][-1:] if position else [])
                row = [max(values) for values in zip(*rows, strict=True)] if rows else [0] * len(programs)
                row[d] = position + 1
                clocks[d].append(row)
                moved = True
    return clocks
