"""How many bytes of messages can be in flight at once, however slow or fast the devices are.

No channel limits how far a sender may run ahead of a receiver. The schedule does: a device can only run what depends on
nothing that is still to be done, and between two steps each device waits until its messages have left. A message is in
flight from the end of the task that sends it to the start of the task that uses it. Until its receive has run, the
sender holds a copy of it (its snapshot, or a place in a ring); then the receiver holds it in its p2p buffers. So each
end holds at most the bytes in flight on its side:

What a device knows of another is what that one's own messages to it tell: a message shows that its sender has run all
tasks up to the one that sent it. So a message counts until its sender has received one that was sent after its use, and
at its receiver from when the sender may have come to it: a bound at both ends (``held_messages``), and on how many are
unreceived at once (``unreceived_messages``), in time linear in tasks. It counts some messages longer than the exact
bound, which follows who waits for whom over all devices; for pipelines whose neighbours talk both ways the two agree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
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


class _Span(NamedTuple):
    """How long the two ends of a message may hold it, in positions of their orders; the end of a step is -1."""

    sender: int
    sent: int
    released: int
    receiver: int
    coming: int
    used: int
    size: float


def _spans(ways: Mapping[tuple[int, int], Sequence[tuple[int, int, float]]]) -> Iterator[_Span]:
    """Iterate over messages, given by sender and receiver: positions in their orders, and bytes."""
    # Per (device, other one): at which positions it receives, and how many tasks that one has then run at least.
    steps: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for (d, e), messages in ways.items():
        shown: dict[int, int] = {}
        for i, j, _ in messages:
            if shown.get(j, 0) <= i:
                shown[j] = i + 1
        places = sorted(shown)
        steps[e, d] = (places, list(accumulate((shown[k] for k in places), max)))
    for (d, e), messages in ways.items():
        places, ran = steps.get((d, e), ([], []))
        for i, j, size in messages:
            # The sender holds it until it has received something that the receiver sent after it used the message.
            at = bisect_left(ran, j + 1)
            released = places[at] if at < len(places) else -1
            # The receiver may have it as soon as it has done what the sender's task waited for.
            at = bisect_left(places, i + 1)
            yield _Span(d, i, released, e, ran[at - 1] if at else 0, j, size)


def _held(schedule: Schedule, ways: Mapping[tuple[int, int], Sequence[tuple[int, int, float]]]) -> list[list[float]]:
    change = [[0.0] * (len(order) + 1) for order in schedule.orders]
    for sender, sent, released, receiver, coming, used, size in _spans(ways):
        change[sender][sent] += size
        change[sender][released] -= size
        if coming < used:
            change[receiver][coming] += size
            change[receiver][used] -= size
    return [list(accumulate(row[:-1])) for row in change]


@no_collection()
def unreceived_messages(programs: Sequence[Program]) -> list[dict[int, int]]:
    """Return, per device and destination, the most messages sent and not used, over all executions of a whole step."""
    used: dict[Message, int] = {}
    for program in programs:
        for j, action in enumerate(program.actions):
            for m in action.receives:
                used.setdefault(m, j)
    ways: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
    for program in programs:
        for i, action in enumerate(program.actions):
            for m in action.sends:
                if not m.local:
                    ways.setdefault((m.src_device, m.dst_device), []).append((i, used[m], 1.0))
    change: list[dict[int, list[int]]] = [{} for _ in programs]
    for span in _spans(ways):
        row = change[span.sender].setdefault(span.receiver, [0] * (len(programs[span.sender].actions) + 1))
        row[span.sent] += 1
        row[span.released] -= 1
    return [{e: max(accumulate(row)) for e, row in rows.items()} for rows in change]
