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

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.schedule.deps import Direction, transfers
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.programs import Message, Program

_Place = tuple[int, int]
"""(device, position in its order)."""
_Way = tuple[int, int]
"""(sender, receiver)."""
_Positions = NDArray[np.int64]


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
    ways: dict[_Way, list[tuple[int, int, float]]] = {}
    for tensor, places in made.items():
        way, source, to = tensor
        size, first = sizes[source if way == "act" else to], used[tensor]
        for mb, (d, i) in places.items():
            e, j = first.get(mb, (d, i))
            if d != e:
                ways.setdefault((d, e), []).append((i, j, size))
    return _held(schedule, ways)


class _Spans(NamedTuple):
    """How long the two ends hold the messages that one sends the other, in positions of their orders; an entry of each
    array is a message. The end of a step is -1."""

    sent: _Positions
    released: _Positions
    coming: _Positions
    used: _Positions
    sizes: NDArray[np.float64]


def _spans(ways: Mapping[_Way, Sequence[tuple[int, int, float]]]) -> Iterator[tuple[_Way, _Spans]]:
    """Iterate over senders and receivers, given the messages of each: positions in their orders, and bytes."""
    columns = {way: [np.array(column) for column in zip(*messages, strict=True)] for way, messages in ways.items()}
    # Per (device, other one): at which positions it receives, and how many tasks that one has then run at least.
    steps: dict[_Way, tuple[_Positions, _Positions]] = {}
    for (d, e), (sent, used, _) in columns.items():
        places, which = np.unique(used, return_inverse=True)
        shown = np.zeros(len(places), dtype=np.int64)
        np.maximum.at(shown, which, sent + 1)
        steps[e, d] = places, np.maximum.accumulate(shown)
    nothing = np.zeros(0, dtype=np.int64)
    for (d, e), (sent, used, sizes) in columns.items():
        places, ran = steps.get((d, e), (nothing, nothing))
        # The sender holds it until it has received something that the receiver sent after it used the message.
        released = np.append(places, -1)[np.searchsorted(ran, used + 1)]
        # The receiver may have it as soon as it has done what the sender's task waited for.
        coming = np.append(0, ran)[np.searchsorted(places, sent + 1)]
        yield (d, e), _Spans(sent, released, coming, used, sizes)


def _held(schedule: Schedule, ways: Mapping[_Way, Sequence[tuple[int, int, float]]]) -> list[list[float]]:
    change = [np.zeros(len(order) + 1) for order in schedule.orders]
    for (d, e), (sent, released, coming, used, sizes) in _spans(ways):
        np.add.at(change[d], sent, sizes)
        np.subtract.at(change[d], released, sizes)
        early = coming < used
        np.add.at(change[e], coming[early], sizes[early])
        np.subtract.at(change[e], used[early], sizes[early])
    return [np.cumsum(row[:-1]).tolist() for row in change]


@no_collection()
def unreceived_messages(programs: Sequence[Program]) -> list[dict[int, int]]:
    """Return, per device and destination, the most messages sent and not used, over all executions of a whole step."""
    used: dict[Message, int] = {}
    for program in programs:
        for j, action in enumerate(program.actions):
            for m in action.receives:
                used.setdefault(m, j)
    ways: dict[_Way, list[tuple[int, int, float]]] = {}
    for program in programs:
        for i, action in enumerate(program.actions):
            for m in action.sends:
                if not m.local:
                    ways.setdefault((m.src_device, m.dst_device), []).append((i, used[m], 1.0))
    result: list[dict[int, int]] = [{} for _ in programs]
    for (d, e), spans in _spans(ways):
        change = np.zeros(len(programs[d].actions) + 1, dtype=np.int64)
        np.add.at(change, spans.sent, 1)
        np.subtract.at(change, spans.released, 1)
        result[d][e] = int(np.cumsum(change).max())
    return result
