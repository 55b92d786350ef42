"""Searched gather positions on random shapes, against both ends and against torch's own lowering of the same order."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.bench.search.line import Effort, Line
from tests.search.gathers.test_positions import compare

GAIN = 1.25


def gathers(effort: Effort) -> Iterator[Line]:
    """One line for all shapes; ``compare`` raises where a found placement is slower than an end that fits."""
    rng = random.Random(21 + effort.first)
    found = [compare(rng) for _ in range(effort.count)]
    slow = [gain for is_slow, gain in found if is_slow]
    enough = sum(gain >= GAIN for gain in slow)
    yield Line(
        f"{len(found)} shapes, none slower than either end; {enough} of {len(slow)} with a slow link at least {GAIN} "
        f"times as fast as torch's lowering, the least of all {min(gain for _, gain in found):.2f} times",
        value=len(slow) / 2 - enough,
    )
