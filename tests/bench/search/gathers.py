"""Searched gather positions on random shapes, against both ends and against torch's own lowering of the same order, and
in plans, against the best policy that fits.

With ``--emulate N``, so many of the shapes run on emulated devices in place of the plans, two copies each, as searched
and as torch lowers them: real driver, actors, programs, messages and collectives; tasks and links are timed waits.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from statistics import median

from raypipe.plan.searched import better_gathers
from raypipe.runtime.emulation.emulated_run import rehearsal
from raypipe.runtime.emulation.links import Links
from tests.bench.search.line import Effort, Line
from tests.bench.turns import Turns, lead, longer, take_turns
from tests.plan.test_searched_gathers import first_that_fits, policies_that_fit, shapes
from tests.search.test_positions import Searched, compare, makespan

GAIN = 1.25
COPIES = 2
"""Data-parallel copies of an emulated shape."""
STEP_S, STEPS = 1.5, 4
"""An emulated step of torch's lowering, and steps of a turn, of which the first is left out."""
OFF = 0.03
"""Most that a measured step may differ from its prediction."""


def gathers(effort: Effort) -> Iterator[Line]:
    """A line for shapes and one for plans; ``compare`` raises where a placement is slower than an end that fits."""
    rng = random.Random(21 + effort.first)
    result = [compare(rng) for _ in range(effort.count)]
    slow = [one.gain for one in result if one.slow]
    enough = sum(gain >= GAIN for gain in slow)
    yield Line(
        f"{len(result)} shapes, none slower than either end; {enough} of {len(slow)} with a slow link at least {GAIN} "
        f"times as fast as torch's lowering, the least of all {min(one.gain for one in result):.2f} times",
        value=len(slow) / 2 - enough,
    )
    if effort.emulate:
        yield from emulated(random.Random(effort.first).sample(result, min(effort.emulate, len(result))))
        return
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


def emulated(sample: Sequence[Searched]) -> Iterator[Line]:
    """A line for each shape, and one for all of them."""
    pairs = []
    for one in sample:
        costs = longer(one.costs, STEP_S / makespan(one.lowered, one.costs))
        pairs.append([Turns(rehearsal(order, costs, Links(), COPIES, "wait")) for order in (one.lowered, one.found)])
    take_turns([turns for pair in pairs for turns in pair], 1, STEPS)
    for one, (torchs, ours) in zip(sample, pairs, strict=True):
        predicted, measured = lead(ours, torchs)
        yield Line(
            f"{one.found.devices} x {COPIES} devices, {one.found.stages} stages, {one.found.microbatches} "
            f"micro-batches: step {ours.step_s:.3f} s, off {ours.error:+.1%}; "
            f"torch's lowering {torchs.step_s:.3f} s, off {torchs.error:+.1%}; "
            f"{predicted:.2f} times as fast by prediction, {measured:.2f} measured",
            value=max(abs(torchs.error), abs(ours.error)), most=OFF,
        )  # fmt: skip
    off = [abs(turns.error) for pair in pairs for turns in pair]
    yield Line(
        f"{len(sample)} shapes emulated: steps off their prediction by {median(off):.1%} in the median, "
        f"{max(off):.1%} at most"
    )
