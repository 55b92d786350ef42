"""How close micro-batches can follow one another on a device that holds several of their stages.

Say a micro-batch starts its last forward on the device at time T. At the latest then, less what lies between them, it
has taken an activation at each earlier stage it has there; and it frees each one no sooner than the path from T through
the turn and back allows. So whatever the order, it holds at least that profile of memory around T, and the profiles of
all micro-batches have to fit into the device's memory together. The least distances between their T are found by
trying all packings of a few of them.
"""

from __future__ import annotations

import math
from functools import lru_cache

Steps = tuple[tuple[float, float], ...]
"""(distance from T, activations)."""

_STATES = 150
"""Packings of the last few profiles that are looked at for each further one; more than that, and it isn't tried."""


@lru_cache(maxsize=4096)
def distances(ups: Steps, downs: Steps, room: float, most: int) -> tuple[float, ...]:
    """Least distance between the first T and the k-th after it, for k = 1, 2, .. up to ``most`` or to what is tried.

    Args:
        ups: how long before T, at the latest, how many activations are taken.
        downs: how long after T, at the earliest, how many are freed.
        room: activations that fit.
        most: profiles after the first.

    In some packing with the least distance no profile can move earlier: it follows the one before at once, or one of
    its takes waits for an earlier profile to free. So these places are all that is tried.

    >>> distances(((0.0, 1.0),), ((10.0, 1.0),), 2.0, 4)
    (0.0, 10.0, 10.0, 20.0)
    """
    before, after = max(t for t, _ in ups), max(t for t, _ in downs)
    tiny = 1e-9 * (before + after)
    waits = sorted({up + down for up, _ in ups for down, _ in downs})
    packed: dict[tuple[int, ...], tuple[float, tuple[float, ...]]] = {(0,): (0.0, (0.0,))}
    found: list[float] = []
    for _ in range(most):
        longer: dict[tuple[int, ...], tuple[float, tuple[float, ...]]] = {}
        for last, ages in packed.values():  # ages: how long ago their T was, of those still of matter
            places = {0.0} | {wait - age for age in ages for wait in waits if wait > age}
            for gap in places:
                others = [age + gap for age in ages]
                if not _fits(others, ups, downs, room + 1e-9, tiny):
                    continue
                alive = (0.0, *(age for age in others if age < before + after - tiny))
                key = tuple(round(age / tiny) if tiny else 0 for age in alive)
                known = longer.get(key)
                if known is None or last + gap < known[0]:
                    longer[key] = last + gap, alive
        found.append(min(at for at, _ in longer.values()))
        if len(longer) > _STATES:
            break
        packed = longer
    return tuple(found)


def _fits(others: list[float], ups: Steps, downs: Steps, room: float, tiny: float) -> bool:
    """May a profile with T = now be added to others, so long ago? Looks at the moments at which something is taken."""
    first = -max(t for t, _ in ups)
    every = [0.0, *others]
    moments = {-up - age for age in every for up, _ in ups}
    for now in moments:
        if now < first - tiny:
            continue
        held = 0.0
        for age in every:
            at = now + age
            held += sum(n for up, n in ups if -up <= at + tiny) - sum(n for down, n in downs if down <= at + tiny)
        if held > room:
            return False
    return True


def telling(found: tuple[float, ...]) -> list[tuple[int, float]]:
    """(k, distance) that the ones before do not imply."""
    implied = [0.0]
    rows: list[tuple[int, float]] = []
    for k, distance in enumerate(found, 1):
        sums = max((implied[a] + implied[k - a] for a in range(1, k)), default=0.0)
        implied.append(max(distance, sums))
        if distance > sums and distance > 0 and math.isfinite(distance):
            rows.append((k, distance))
    return rows
