"""The deal of layers to stages, against every deal there is."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from raypipe.plan.cut.bottleneck import bottlenecks, contiguous_split


def sums(costs: list[float], cuts: tuple[int, ...]) -> list[float]:
    return [sum(costs[a:b]) for a, b in pairwise([0, *cuts, len(costs)])]


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_most_even_and_of_those_the_one_with_late_large_stages(seed: int) -> None:
    rng = random.Random(seed)
    costs = [rng.choice([1.0, 1.0, 1.0, 0.1, 2.7]) for _ in range(rng.randint(4, 9))]
    for parts in range(1, len(costs) + 1):
        every = [(c, sums(costs, c)) for c in combinations(range(1, len(costs)), parts - 1)]
        slowest = min(max(s) for _, s in every)
        even = [(sum(x * x for x in s), c) for c, s in every if max(s) <= slowest * (1 + 1e-9)]
        least = min(square for square, _ in even)
        expected = min((c[::-1] for square, c in even if square <= least * (1 + 1e-9)), default=())[::-1]
        assert contiguous_split(costs, parts) == list(expected)
        assert contiguous_split(costs, parts, bottlenecks(costs, parts)[-1]) == list(expected)
