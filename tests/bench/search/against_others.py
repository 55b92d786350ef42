"""``auto`` against other schedulers: the zero-bubble authors' own, and their heuristic as the paper describes it."""

from __future__ import annotations

import random
from collections.abc import Iterator

from raypipe.schedule.costs import CostTable
from raypipe.search import search
from raypipe.search.budget import Budget
from tests.bench.search.line import Effort, Line
from tests.bench.search.zero_bubble_heuristic import shortest

PEER = [
    (4, 16, (10, 11, 8, 1), 515, 473), (8, 32, (10, 11, 8, 1), 1047, 939), (8, 64, (10, 11, 8, 1), 1975, 1867),
    (16, 64, (10, 11, 8, 1), 2111, 1891), (32, 128, (10, 11, 8, 1), 4239, 3795), (8, 24, (10, 10, 10, 0), 790, 720),
]  # fmt: skip
"""Devices, micro-batches, F, B, W, c, and the longest device's span in 1F1B's memory and in twice as much.

Taken once by running ``Graph.manual_order`` of the zero-bubble repository (all eight choices, the best) and not made
here. It makes the longest device's span small, in a memory limit per device in activations of which the B gives back a
share, here a half; rows with F = B = W = 10 and c = 0 come out the same with any share.
"""


def peers(effort: Effort) -> Iterator[Line]:
    """One line a case and memory."""
    yield Line("  D x N     memory   peer   auto  bound  seconds   auto's makespan")
    for depth, count, (f, b, w, c), same, twice in PEER[: effort.count]:
        costs = CostTable.even(depth, f, b, w, comm=c)
        for memory, peer in ((depth, same), (2 * depth, twice)):
            line = (tuple(range(depth)),)
            result = search(line, count, costs, memory_limit=memory, freed_by_b=0.5, objective="span")
            whole = search(line, count, costs, memory_limit=memory, freed_by_b=0.5)
            text = (
                f"{depth:>3} x {count:<4} {memory:>6} {peer:>8} {result.value:>6g} {result.bound:>6g} "
                f"{result.seconds:>7.2f} {whole.value:>10g} (bound {whole.bound:g})"
            )
            yield Line(text, result.value, peer)


def uneven(effort: Effort) -> Iterator[Line]:
    """D = 4..16, N = D..4D, in 1F1B's memory, in half of it and in twice as much: one line a case, then the means."""
    totals: dict[str, list[tuple[float, float]]] = {}
    for seed in range(effort.first, effort.first + effort.count):
        rng = random.Random(seed)
        depth = rng.choice((4, 5, 6, 8, 10, 12, 16))
        count = rng.randint(depth, 4 * depth)
        share = ("half", "same", "twice")[seed % 3]
        memory = {"half": max(1, depth // 2), "same": depth, "twice": 2 * depth}[share]
        base = rng.choice(((10, 10, 10), (10, 12, 8), (10, 20, 10)))
        times = [tuple(t * rng.uniform(1, 1.25) for _ in range(depth)) for t in base]
        costs = CostTable(forward=times[0], input_grad=times[1], weight_grad=times[2], comm=rng.choice((0, 1, 2)))
        result = search((tuple(range(depth)),), count, costs, memory_limit=memory, budget=Budget(effort.seconds))
        other = shortest(depth, count, costs, memory)
        totals.setdefault(share, []).append((result.gap, other / result.value - 1))
        text = (
            f"D={depth:<2} N={count:<2} memory {memory:<2} ({share:5}) auto {result.value:8.1f} gap {result.gap:6.2%} "
            f"heuristic {other / result.value - 1:+7.2%} in {result.seconds:.2f} s"
        )
        yield Line(text, result.value, other)
    for share, rows in sorted(totals.items()):
        gaps, leads = zip(*rows, strict=True)
        mean_gap, mean_lead = sum(gaps) / len(gaps), sum(leads) / len(leads)
        yield Line(f"{share:5}: mean gap {mean_gap:.3%}, heuristic longer by {mean_lead:.2%}")
