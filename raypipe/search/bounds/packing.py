"""How closely micro-batches can follow each other on a device that holds several of their stages.

Let a micro-batch start its last forward on the device at time T. It has then allocated an activation at each of its
earlier stages there, at the latest the length of the path from that stage's forward before T; and it frees each
activation at the earliest the length of the path from T to the freeing task after T. In any order, the micro-batch
therefore uses at least this memory profile around T, and the profiles of all micro-batches must fit into the device's
memory together. The smallest distances between their T are found by trying all packings of a few profiles.
"""

from __future__ import annotations

import math
from functools import lru_cache

Steps = tuple[tuple[float, float], ...]
"""(distance from T, activations)."""

_STATES = 150
"""Distinct packings up to which one more profile is added; with more of them the enumeration stops."""


@lru_cache(maxsize=4096)
def distances(ups: Steps, downs: Steps, room: float, most: int) -> tuple[float, ...]:
    """Return the smallest distance between the first T and the k-th T after it, for k = 1, 2, ...

    Some packing with the smallest distance is left-justified: each profile either starts together with the one before,
    or one of its allocations waits for an earlier profile to free memory. Only such positions are tried.

    Args:
        ups: (time before T, activations allocated then at the latest).
        downs: (time after T, activations freed then at the earliest).
        room: activations that fit.
        most: number of profiles after the first.

    Returns:
        At most ``most`` distances; fewer where there are too many packings to enumerate.

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
        for last, ages in packed.values():  # ages: time since the T of each profile that may still hold memory
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
    """Return whether a profile with T = 0 fits beside profiles with these ages; checked at every allocation."""
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


def not_implied(found: tuple[float, ...]) -> list[tuple[int, float]]:
    """Return the ``(k, distance)`` that do not already follow from sums of shorter distances."""
    implied = [0.0]
    rows: list[tuple[int, float]] = []
    for k, distance in enumerate(found, 1):
        sums = max((implied[a] + implied[k - a] for a in range(1, k)), default=0.0)
        implied.append(max(distance, sums))
        if distance > sums and distance > 0 and math.isfinite(distance):
            rows.append((k, distance))
    return rows
