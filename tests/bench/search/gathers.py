"""Searched gather positions on random shapes, against both ends and against torch's own lowering of the same order, and
in plans, against the best policy that fits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from statistics import median

from raypipe.plan.searched_gathers import better_gathers
from tests.bench.search.line import Effort, Line
from tests.plan.test_searched_gathers import first_that_fits, policies_that_fit, shapes
from tests.search.gathers.test_positions import compare

GAIN = 1.25


def gathers(effort: Effort) -> Iterator[Line]:
    """A line for shapes and one for plans; ``compare`` raises where a placement is slower than an end that fits."""
    rng = random.Random(21 + effort.first)
    found = [compare(rng) for _ in range(effort.count)]
    slow = [gain for is_slow, gain in found if is_slow]
    enough = sum(gain >= GAIN for gain in slow)
    yield Line(
        f"{len(found)} shapes, none slower than either end; {enough} of {len(slow)} with a slow link at least {GAIN} "
        f"times as fast as torch's lowering, the least of all {min(gain for _, gain in found):.2f} times",
        value=len(slow) / 2 - enough,
    )
    ratios = []
    for _, judge, c in shapes(effort.count, 21 + effort.first):
        best = min(p.step_s for p in policies_that_fit(judge, c))
        ratios.append(best / better_gathers(judge, first_that_fits(judge, c), 1.0).step_s)
    faster = [ratio for ratio in ratios if ratio > 1.001]
    yield Line(
        f"{len(ratios)} plans of level 3: {len(faster)} faster than the best policy that fits, their median "
        f"{median(faster or [1.0]):.2f} times, at most {max(ratios):.2f} times, least {min(ratios):.3f} times",
        value=1 - min(ratios) - 1e-9,
    )
