"""An image encoder and a language model on emulated devices: the encoder in stage 0, and in every device's gaps.

The language model has as much work on each device; the encoder has a share of all forwards, and is trained or frozen.
``stage 0``: 1F1B whose first stage has the encoder too. ``even``: the cut of both in parts of equal time, in the
shortest order that a search finds for the row of devices. ``gaps``: ``placement: encoder``. The ideal is all work in
equal parts without a gap. Of 4 and 8 devices the simulated step; of 8 also the step of real actors, programs and
messages with timed waits instead of kernels (not with ``--rounds 0``). Exits with 1 where ``gaps`` is less than 1.2
times as fast as ``stage 0``.
"""

from __future__ import annotations

import sys
from itertools import pairwise, product

from raypipe.runtime.emulation.emulated_run import rehearsal
from raypipe.runtime.emulation.links import Links
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Rules, Schedule
from raypipe.search import search
from raypipe.search.placements import placed
from raypipe.simulate.engine import simulate
from tests.bench.command import options
from tests.bench.turns import Turns, longer, table, take_turns

DEVICES, MICROBATCHES = 8, 16
SHARES = (0.15, 0.3)
"""Of all forwards, the encoder's."""
HOP = 0.001
"""A message, as a share of a whole model's forward."""
STEP_S = 1.0
"""What an ideal step takes, after scaling."""
LAYERS = 8
"""Layers of each device's stages, of the encoder and of the language model."""


def costs_of(forward: list[float], backward: list[float]) -> CostTable:
    return CostTable(forward=tuple(forward), input_grad=tuple(backward), weight_grad=tuple(backward), comm=HOP)


def steps_of(share: float, trained: bool, devices: int) -> tuple[float, dict[str, tuple[Schedule, CostTable]]]:
    """Return the ideal step, and schedule and costs of each way."""
    rest, each = (1 - share) / devices, share / devices
    back = each * trained
    shape = Shape(devices=devices, microbatches=MICROBATCHES)
    first = costs_of([share + rest, *[rest] * (devices - 1)], [share * trained + rest, *[rest] * (devices - 1)])
    layers = [(each / LAYERS, back / LAYERS)] * devices * LAYERS + [(rest / LAYERS, rest / LAYERS)] * devices * LAYERS
    whole, ends, done = sum(f + 2 * b for f, b in layers), [0], 0.0
    for number, (f, b) in enumerate(layers):
        done += f + 2 * b
        if done >= whole * len(ends) / devices - 1e-9:
            ends.append(number + 1)
    parts = [layers[a:b] for a, b in pairwise(ends)]
    even = costs_of([sum(f for f, _ in part) for part in parts], [sum(b for _, b in part) for part in parts])
    both = costs_of([each] * devices + [rest] * devices, [back] * devices + [rest] * devices)
    frozen = () if trained else tuple(s for s in range(devices) if not even.weight_grad[s])
    orders = {
        "stage 0": (generate("1f1b", shape, first), first),
        "even": (search(placed("line", shape), MICROBATCHES, even, rules=Rules(frozen=frozen)).schedule, even),
        "gaps": (
            search(
                placed("encoder", shape),
                MICROBATCHES,
                both,
                rules=Rules(frozen=() if trained else tuple(range(devices))),
            ).schedule,
            both,
        ),
    }
    return MICROBATCHES * whole / devices, orders


def main() -> int:
    args = options(__doc__, rounds=3, steps=4)
    turns, least, lines = [], float("inf"), []
    for share, trained, devices in product(SHARES, (True, False), (4, DEVICES)):
        ideal, ways = steps_of(share, trained, devices)
        name = f"{devices} devices, {share:.0%}, {'trained' if trained else 'frozen'}"
        one = {}
        for way, (schedule, costs) in ways.items():
            scaled = longer(costs, STEP_S / ideal)
            one[way] = Turns(rehearsal(schedule, scaled, Links(), 1), way)
        turns += list(one.values()) if devices == DEVICES else []
        lines.append((name, devices, one))
    if args.rounds:
        take_turns(turns, args.rounds, args.steps)
    rows = []
    for name, devices, one in lines:
        shares = {way: STEP_S / simulate(each.what.schedule, each.what.costs).makespan for way, each in one.items()}
        measured = bool(args.rounds) and devices == DEVICES
        gain = one["stage 0"].step_s / one["gaps"].step_s if measured else shares["gaps"] / shares["stage 0"]
        least = min(least, gain)
        emulated = [f"{STEP_S / each.step_s:.1%}" if measured else "-" for each in one.values()]
        rows.append((name, *(f"{value:.1%}" for value in shares.values()), *emulated, f"{gain:.2f}"))
    heads = ("encoder's share", *(f"{way}, {kind}" for kind in ("simulated", "emulated") for way in lines[0][2]))
    table("Share of the ideal's speed", (*heads, "gaps / stage 0"), rows)
    return int(least < 1.2)


if __name__ == "__main__":
    sys.exit(main())
