"""How many bytes of messages can be in flight at once, however slow or fast the devices are.

No channel limits how far a sender may run ahead of a receiver. The schedule does: a device can only run what depends on
nothing that is still to be done, and between two steps each device waits until its messages have left. A message is in
flight from the end of the task that sends it to the start of the task that uses it. Until its receive has run, the
sender holds a copy of it (its snapshot, or a place in a ring); then the receiver holds it in its p2p buffers. So each
end holds at most the bytes in flight on its side:

``unreceived_messages`` are those after a device's task i, when all other devices have done only what i depends on. It
    follows who waits for whom over all devices, in time tasks times devices.
``held_messages`` is a bound at both ends that is quick enough for every candidate plan. A device knows of another only
    what that one's own messages to it tell: a message shows that its sender has run all tasks up to the one that sent
    it. So a message counts for as long or longer, in time linear in tasks. For pipelines whose neighbours talk both
    ways the two are the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from raypipe.schedule.deps import Direction, transfers
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.programs import Message, Program

_Place = tuple[int, int]
"""(device, position in its order)."""


@no_collection()
def held_messages(schedule: Schedule, sizes: Sequence[float]) -> list[list[float]]:
    """Return, per device and position in its order, the most that it may hold of messages beside its task's.

    Counted are messages that it has sent and that may not have been used yet, those of this very task included (its
    snapshots), and messages that may have come for later tasks. Those that this task uses are its own memory.

    Args:
        schedule: a step that drains.
        sizes: per stage, the bytes of the message with its output, and of the gradient of that.
    """
    taken, given = transfers(schedule.graph, schedule.rules)
    # Per tensor (direction, from stage, to stage) and micro-batch: where it is made, and where it is first used.
    made: dict[tuple[Direction, int, int], dict[int, _Place]] = {}
    used: dict[tuple[Direction, int, int], dict[int, _Place]] = {}
    for kind, stage in given:
        for way, to in given[kind, stage]:
            made[way, stage, to], used[way, stage, to] = {}, {}
    touched = {
        key: (
            [used[way, source, key[1]] for way, source in taken.get(key, ())],
            [made[way, key[1], to] for way, to in given.get(key, ())],
        )
        for key in taken.keys() | given.keys()
    }
    for d, order in enumerate(schedule.orders):
        for i, (kind, stage, mbs, _) in enumerate(order):
            here = touched.get((kind, stage))
            if here is None:
                continue
            uses, makes = here
            place = (d, i)
            for mb in mbs:
                for first in uses:
                    first.setdefault(mb, place)
                for last in makes:
                    last[mb] = place
    # Per sender and receiver: positions in their orders, and bytes.
    ways: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
    for tensor, places in made.items():
        way, source, to = tensor
        size, first = sizes[source if way == "act" else to], used[tensor]
        for mb, (d, i) in places.items():
            e, j = first.get(mb, (d, i))
            if d != e:
                ways.setdefault((d, e), []).append((i, j, size))
    return _held(schedule, ways)


def _held(schedule: Schedule, ways: Mapping[tuple[int, int], Sequence[tuple[int, int, float]]]) -> list[list[float]]:
    # Per (device, other one): at which positions it receives, and how many tasks that one has then run at least.
    steps: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for (d, e), messages in ways.items():
        shown: dict[int, int] = {}
        for i, j, _ in messages:
            if shown.get(j, 0) <= i:
                shown[j] = i + 1
        places = sorted(shown)
        steps[e, d] = (places, list(accumulate((shown[k] for k in places), max)))
    change = [[0.0] * (len(order) + 1) for order in schedule.orders]
    for (d, e), messages in ways.items():
        sent, arriving = change[d], change[e]
        places, ran = steps.get((d, e), ([], []))
        for i, j, size in messages:
            # The sender holds it until it has received something that the receiver sent after it used the message.
            at = bisect_left(ran, j + 1)
            sent[i] += size
            sent[places[at] if at < len(places) else -1] -= size
            # The receiver may have it as soon as it has done what the sender's task waited for.
            at = bisect_left(places, i + 1)
            since = ran[at - 1] if at else 0
            if since < j:
                arriving[since] += size
                arriving[j] -= size
    return [list(accumulate(row[:-1])) for row in change]


class Flight(NamedTuple):
    """A message with the tasks that send and use it, by position in their devices' programs."""

    message: Message
    producer: int
    consumer: int


@no_collection()
def unreceived_messages(programs: Sequence[Program]) -> list[dict[int, int]]:
    """Return, per device and destination, the most messages sent and not used, over all executions of a whole step."""
    ways = flights(programs)
    before = ancestors(programs, ways)
    change: list[dict[int, list[int]]] = [{} for _ in programs]
    for m, producer, consumer in ways:
        d, e = m.src_device, m.dst_device
        row = change[d].setdefault(e, [0] * (len(programs[d].actions) + 1))
        row[producer] += 1
        row[bisect_right(before[d], consumer, key=lambda clock, e=e: clock[e])] -= 1  # type: ignore[misc]
    return [{e: max(accumulate(row)) for e, row in rows.items()} for rows in change]


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
