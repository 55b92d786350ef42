"""Better deals by moving the borders between stages: for placements without an exact method, and to even out ties."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raypipe.plan.cut.runs import ROUNDING, Runs

Key = tuple[float, ...]


def move_borders(runs: Runs, starts: Sequence[int], groups: Sequence[tuple[int, ...]]) -> list[int]:
    """Move borders, some neighbouring ones at a time, as long as that makes the deal better.

    Better is, in this order: less memory over the limit, a faster slowest device, a faster slowest stage, and a
    smaller sum of squares over devices and stages. ``groups`` are the stages of each device.
    """
    best = list(starts)
    key = measure(runs, best, groups)
    improved = True
    while improved:
        improved = False
        for moved in _moves(best, runs.count):
            found = measure(runs, moved, groups)
            if _less(found, key):
                best, key, improved = moved, found, True
                break
    return best


def measure(runs: Runs, starts: Sequence[int], groups: Sequence[tuple[int, ...]]) -> Key:
    """What makes one deal better than another; smaller is better."""
    ends = [*starts[1:], runs.count]
    stage = [float(runs.cost[a, b]) for a, b in zip(starts, ends, strict=True)]
    device = [sum(stage[s] for s in group) for group in groups]
    return (
        sum(max(0.0, need - runs.limit) for need in needs(runs, starts, groups)),
        max(device), max(stage), sum(d * d for d in device), sum(s * s for s in stage),
    )  # fmt: skip


def needs(runs: Runs, starts: Sequence[int], groups: Sequence[tuple[int, ...]]) -> list[float]:
    """Bytes that each device needs; empty where memory does not matter."""
    if runs.weights is None or runs.kept is None:
        return []
    ends = [*starts[1:], runs.count]
    each = [
        float(runs.weights[a, b]) + runs.live[s] * float(runs.kept[a, b])
        for s, (a, b) in enumerate(zip(starts, ends, strict=True))
    ]
    return [sum(each[s] for s in group) for group in groups]


def _moves(starts: list[int], count: int) -> Iterator[list[int]]:
    """Neighbouring borders, one or more, moved by the same power of two, no stage becoming empty."""
    steps = [sign * 2**k for k in range(count.bit_length()) for sign in (1, -1)]
    for first in range(1, len(starts)):
        for step in steps:
            for last in range(first, len(starts)):
                moved = [s + step if first <= k <= last else s for k, s in enumerate(starts)]
                if moved[first] <= moved[first - 1] or moved[last] >= (*moved, count)[last + 1]:
                    continue
                yield moved


def _less(a: Key, b: Key) -> bool:
    """Whether the first is smaller, differences by rounding left out."""
    for x, y in zip(a, b, strict=True):
        if abs(x - y) > 10 * ROUNDING * max(abs(x), abs(y)):
            return x < y
    return False
