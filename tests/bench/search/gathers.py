"""Searched gather positions on random shapes, against both ends and against torch's own lowering of the same order, and
in plans, against the best policy that fits.

With ``--emulate N``, so many of the shapes run on emulated devices in place of the plans, two copies each, as searched
and as torch lowers them: real driver, actors, programs, messages and collectives; tasks and links are timed waits.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from statistics import median

from raypipe.plan.searched_gathers import better_gathers
from raypipe.runtime.emulation.emulated_run import rehearsal, run_rehearsal
from raypipe.runtime.emulation.links import Links
from raypipe.schedule.ir import Schedule
from tests.bench.accuracy.emulated import first, longer, worker_group_of
from tests.bench.search.line import Effort, Line
from tests.plan.test_searched_gathers import first_that_fits, policies_that_fit, shapes
from tests.search.gathers.test_positions import Searched, compare, makespan

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
    found = [compare(rng) for _ in range(effort.count)]
    slow = [one.gain for one in found if one.slow]
    enough = sum(gain >= GAIN for gain in slow)
    yield Line(
        f"{len(found)} shapes, none slower than either end; {enough} of {len(slow)} with a slow link at least {GAIN} "
        f"times as fast as torch's lowering, the least of all {min(one.gain for one in found):.2f} times",
        value=len(slow) / 2 - enough,
    )
    if effort.emulate:
        yield from emulated(random.Random(effort.first).sample(found, min(effort.emulate, len(found))))
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
    """A line for each shape, and one for all of them: the same processes emulate one after another."""
    most = max(one.found.devices for one in sample) * COPIES
    off, leads = [], []
    with contextlib.redirect_stdout(sys.stderr), worker_group_of(most) as workers:

        def turn(one: Searched, schedule: Schedule) -> tuple[float, float]:
            """Predicted and measured seconds of a step."""
            costs = longer(one.costs, STEP_S / makespan(one.lowered, one.costs))
            what = rehearsal(schedule, costs, Links(), COPIES, "wait")
            seen = run_rehearsal(what, first(workers, what.schedule.devices), STEPS)
            return median(seen.predicted_steps_s[1:]), median(seen.measured_s[1:])

        seen = [(one, turn(one, one.lowered), turn(one, one.found)) for one in sample]
    for one, torchs, ours in seen:
        errors = [measured / predicted - 1 for predicted, measured in (torchs, ours)]
        leads.append((torchs[0] / ours[0], torchs[1] / ours[1]))
        off += errors
        yield Line(
            f"{one.found.devices} x {COPIES} devices, {one.found.stages} stages, {one.found.microbatches} "
            f"micro-batches: step {ours[1]:.3f} s, off {errors[1]:+.1%}; "
            f"torch's lowering {torchs[1]:.3f} s, off {errors[0]:+.1%}; "
            f"{leads[-1][0]:.2f} times as fast by prediction, {leads[-1][1]:.2f} measured",
            value=max(map(abs, errors)), most=OFF,
        )  # fmt: skip
    yield Line(
        f"{len(sample)} shapes emulated: steps off their prediction by {median(map(abs, off)):.1%} in the median, "
        f"{max(map(abs, off)):.1%} at most"
    )
