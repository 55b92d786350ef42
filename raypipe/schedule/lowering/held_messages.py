"""Bytes of messages that a device may hold while each of its tasks runs: a bound quick enough for every candidate plan.

``messages_in_flight`` follows who waits for whom over all devices, in time tasks times devices. Here a device knows of
another only what that one's own messages to it tell: a message shows that its sender has run all tasks up to the one
that sent it. So a message counts for as long as in ``messages_in_flight``, or longer, in time linear in tasks. For
pipelines whose neighbours talk both ways the two are the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from raypipe.schedule.deps import Direction, transfers
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Schedule

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
            if (kind, stage) not in touched:
                continue
            uses, makes = touched[kind, stage]
            place = (d, i)
            for mb in mbs:
                for first in uses:
                    first.setdefault(mb, place)
                for last in makes:
                    last[mb] = place
    # (sender, position there, receiver, position there, bytes), in no order.
    ways: list[tuple[int, int, int, int, float]] = []
    for tensor, places in made.items():
        way, source, to = tensor
        size, first = sizes[source if way == "act" else to], used[tensor]
        for mb, (d, i) in places.items():
            e, j = first.get(mb, (d, i))
            if d != e:
                ways.append((d, i, e, j, size))
    return _held(schedule, ways)


def _held(schedule: Schedule, ways: Sequence[tuple[int, int, int, int, float]]) -> list[list[float]]:
    # Per (device, other one): at which positions it receives, and how many tasks that one has then run at least.
    told: dict[tuple[int, int], dict[int, int]] = {}
    for d, i, e, j, _ in ways:
        own = told.setdefault((e, d), {})
        if own.get(j, 0) <= i:
            own[j] = i + 1
    steps: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for pair, own in told.items():
        places = sorted(own)
        steps[pair] = (places, list(accumulate((own[k] for k in places), max)))
    change = [[0.0] * (len(order) + 1) for order in schedule.orders]
    nothing: tuple[list[int], list[int]] = ([], [])
    for d, i, e, j, size in ways:
        places, ran = steps.get((d, e), nothing)
        # The sender holds it until it has received something that the receiver sent after it used the message.
        at = bisect_left(ran, j + 1)
        change[d][i] += size
        change[d][places[at] if at < len(places) else -1] -= size
        # The receiver may have it as soon as it has done what the sender's task waited for.
        at = bisect_left(places, i + 1)
        since = ran[at - 1] if at else 0
        if since < j:
            change[e][since] += size
            change[e][j] -= size
    return [list(accumulate(row[:-1])) for row in change]
