"""Arrangements to begin with: lines, rings, Vs and Ws, with laps of equal and of unequal length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from raypipe.plan.joint.arrangement import Arrangement

LAPS = (2, 3, 4)
"""Stages a device, beside one."""
THIN = 0.4
"""Share of an equal lap's work that a thin one has: the pipeline fills the faster, the thinner its first lap is."""


def first_arrangements(work: Sequence[float], devices: int, most_stages: int) -> Iterator[Arrangement]:
    """Yield a line, and rings, Vs and Ws of two laps and more, with equal laps and with a thin first one.

    Args:
        work: of each layer.
        devices: D.
        most_stages: deepest cut of the model.
    """
    down = list(range(devices))
    yield balanced(work, down, [1.0] * devices, devices)
    for laps in LAPS:
        if laps * devices > most_stages:
            return
        ring = down * laps
        vee = [d for lap in range(laps) for d in (down if lap % 2 == 0 else down[::-1])]
        for row in (vee, ring):
            for first in (1.0, THIN):
                wish = [first if s < devices else 1.0 for s in range(len(row))]
                yield balanced(work, row, wish, devices)


def balanced(work: Sequence[float], row: Sequence[int], wish: Sequence[float], devices: int) -> Arrangement:
    """Cut in the proportions wished for, then move borders while the slowest device becomes faster.

    Of equally slow ones, the squares of all devices' work decide.
    """
    count, layers = len(row), len(work)
    before = [0.0, *accumulate(work)]
    total, share = before[-1], list(accumulate(wish))
    starts = [0]
    for s in range(1, count):
        goal = total * share[s - 1] / share[-1]
        at = min(range(layers), key=lambda i: abs(before[i] - goal))
        starts.append(min(max(at, starts[-1] + 1), layers - (count - s)))
    best = _measure(before, starts, row, devices)
    better = True
    while better:
        better = False
        for s in range(1, count):
            for by in (-1, 1, -2, 2):
                low, high = starts[s - 1], starts[s + 1] if s + 1 < count else layers
                if low < starts[s] + by < high:
                    starts[s] += by
                    found = _measure(before, starts, row, devices)
                    if found < best:
                        best, better = found, True
                    else:
                        starts[s] -= by
            # A border next to single layers can only move with its neighbours.
            for first in range(1, s):
                for by in (-1, 1):
                    moved = [x + by if first <= k <= s else x for k, x in enumerate(starts)]
                    if all(a < b for a, b in zip(moved, [*moved[1:], layers], strict=True)):
                        found = _measure(before, moved, row, devices)
                        if found < best:
                            starts, best, better = moved, found, True
    return Arrangement(tuple(starts), tuple(row), layers)


def _measure(before: Sequence[float], starts: Sequence[int], row: Sequence[int], devices: int) -> tuple[float, float]:
    loads = [0.0] * devices
    ends = [*starts[1:], len(before) - 1]
    for a, b, d in zip(starts, ends, row, strict=True):
        loads[d] += before[b] - before[a]
    slowest = max(loads)
    return round(slowest / before[-1], 9), sum(x * x for x in loads) / before[-1] ** 2
