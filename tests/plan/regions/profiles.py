"""Region profiles made up for tests, and a step on two streams played out by a clock of the tests' own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from itertools import pairwise

from raypipe.plan.regions.profile import LayerCost, Region, RegionProfile, Together


def made(
    costs: Sequence[tuple[float, float, float]], back: Sequence[int], ahead: Sequence[int],
    gain: dict[tuple[int, int], float] | float = 1.0, tied: tuple[tuple[int, ...], ...] = (),
    sizes: Sequence[tuple[float, float]] | None = None,
) -> RegionProfile:  # fmt: skip
    """A profile.

    Args:
        costs: forward, input gradient and weight gradient of each layer.
        back: first layer of each backward region, ascending, from 0.
        ahead: first layer of each forward region.
        gain: work per second of both streams together, by (region, layer) or everywhere: 1 is no gain, 2 no slow-down.
        tied: layers that share parameters.
        sizes: kept and waiting bytes of each layer; 2 and 1 by default.
    """
    count = len(costs)
    kept = sizes or [(2.0, 1.0)] * count
    layers = tuple(
        LayerCost(name=f"layer {n}", forward=f, input_grad=b, weight_grad=w, kept_bytes=kept[n][0],
                  waiting_bytes=kept[n][1])
        for n, (f, b, w) in enumerate(costs)
    )  # fmt: skip
    runs = [[range(a, b) for a, b in pairwise([*cut, count])] for cut in (back, ahead)]
    regions = [Region(kind="B", layers=tuple(reversed(run))) for run in reversed(runs[0])]
    regions += [Region(kind="F", layers=tuple(run)) for run in runs[1]]
    together = []
    for number, region in enumerate(regions):
        main = sum(costs[n][1 if region.kind == "B" else 0] for n in region.layers)
        for layer in range(1, count):
            both = gain if isinstance(gain, float) else gain[number, layer]
            sub, rate = costs[layer][2], both / 2  # each stream at half of what both do
            first = min(main, sub) / rate
            last = first + max(main, sub) - min(main, sub)
            ends = (first, last) if main <= sub else (last, first)
            together.append(Together(region=number, layer=layer, main_s=ends[0], sub_s=ends[1]))
    return RegionProfile(
        device="made up", microbatch=1, layers=layers, regions=tuple(regions), together=tuple(together), tied=tied
    )


def random_profile(rng: random.Random, layers: int, gains: tuple[float, float] = (1.0, 1.6)) -> RegionProfile:
    """Layers of lognormal costs, cut at random into up to three regions each way."""
    costs = [tuple(rng.lognormvariate(0, 0.5) for _ in range(3)) for _ in range(layers)]
    cuts = [sorted({0, *rng.sample(range(layers), rng.randint(1, min(3, layers)))}) for _ in range(2)]
    count = sum(map(len, cuts))
    gain = {(r, n): rng.uniform(*gains) for r in range(count) for n in range(1, layers)}
    return made(costs, cuts[0], cuts[1], gain)  # type: ignore[arg-type]


def every_assignment(profile: RegionProfile):
    """All ways to give every layer but the first a region, and an order in it."""
    layers, count = range(1, len(profile.layers)), len(profile.regions)
    for places in itertools.product(range(count), repeat=len(layers)):
        per = [[n for n, place in zip(layers, places, strict=True) if place == r] for r in range(count)]
        for orders in itertools.product(*(itertools.permutations(one) for one in per)):
            yield tuple(map(tuple, orders))


def ticked(profile: RegionProfile, assigned, tick: float) -> float:
    """A step's time, by small ticks: no events, no formulas. Raises TimeoutError for a step that never ends."""
    count, regions = len(profile.layers), profile.regions
    main = [(r, "B" if one.kind == "B" else "F", n) for r, one in enumerate(regions) for n in one.layers]
    border = sum(len(one.layers) for one in regions if one.kind == "B")
    main.insert(border, (main[border - 1][0], "W", 0))
    field = {"B": "input_grad", "F": "forward", "W": "weight_grad"}
    left = [getattr(profile.layers[n], field[kind]) for _, kind, n in main]
    queue = [(r, n) for r, some in enumerate(assigned) for n in some]
    work = {n: profile.layers[n].weight_grad for n in range(1, count)}
    speed = {}
    for one in profile.together:
        a, b = profile.main_s(one.region), work[one.layer]
        short, long = min(one.main_s, one.sub_s), max(one.main_s, one.sub_s)
        done = (a, b - (long - short)) if one.main_s <= one.sub_s else (a - (long - short), b)
        speed[one.region, one.layer] = done[0] / short, done[1] / short
    now, at = 0.0, 0
    while at < len(main):
        region, kind, layer = main[at]
        waits = kind == "F" and any(work[n] > 0 for n in profile.group(layer) if n)
        head = next(((r, n) for r, n in queue if work[n] > 0), None)
        passed = {n for _, k, n in main[:at] if k == "B"}
        runs = head is not None and region >= head[0] and head[1] in passed
        if waits and not runs:
            raise TimeoutError
        rates = speed[region, head[1]] if runs and not waits else (1.0, 1.0)
        if runs:
            work[head[1]] -= tick * rates[1]
        if not waits:
            left[at] -= tick * rates[0]
            if left[at] <= 0:
                at += 1
        now += tick
    return now
