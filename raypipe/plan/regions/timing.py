"""How long a step takes on two streams, and how much memory it holds: the measured pairs played out in time.

The main stream runs the backward, the first layer's weight gradient and the next forward. The second one runs the other
weight gradients with their updates, in order, each no sooner than its region begins and its input gradient is there. A
layer's forward waits for its update. While both streams are busy they run at the speeds that the pair was measured
with, else at full speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from raypipe.errors import ScheduleError
from raypipe.plan.regions.profile import ALONE, RegionProfile

Assigned = tuple[tuple[int, ...], ...]
"""Per region, the layers whose weight gradients begin in it, in order: S[1..N]."""
NOTHING = 1e-12


@dataclass(frozen=True, slots=True)
class TwoStreams:
    """A step on two streams."""

    step_s: float
    """From the begin of the backward to the end of the next forward."""
    peak_bytes: float
    """Most that activations and waiting weight gradients hold at once."""
    begin: tuple[float, ...]
    """When each region's first task begins."""
    ran: dict[int, tuple[float, float]]
    """Layer -> begin and end of its weight gradient on the second stream."""


@dataclass(frozen=True, slots=True)
class _Main:
    """A task of the main stream."""

    kind: str
    layer: int
    region: int
    seconds: float


def main_tasks(profile: RegionProfile) -> list[_Main]:
    """Return the main stream's tasks, in order."""
    tasks: list[_Main] = []
    last = max(i for i, region in enumerate(profile.regions) if region.kind == "B")
    for number, region in enumerate(profile.regions):
        for layer in region.layers:
            cost = profile.layers[layer]
            tasks.append(_Main(region.kind, layer, number, cost.input_grad if region.kind == "B" else cost.forward))
        if number == last:
            tasks.append(_Main("W", 0, number, profile.layers[0].weight_grad))
    return tasks


def in_turn(profile: RegionProfile) -> TwoStreams:
    """Return the usual step: one stream, each weight gradient right after its input gradient."""
    held = sum(layer.kept_bytes for layer in profile.layers)
    peak, now, begin = held, 0.0, []
    for region in profile.regions:
        begin.append(now)
        for layer in region.layers:
            cost = profile.layers[layer]
            now += cost.input_grad + cost.weight_grad if region.kind == "B" else cost.forward
            if region.kind == "B":
                held += cost.waiting_bytes - cost.kept_bytes
                peak = max(peak, held)
                held -= cost.waiting_bytes
    return TwoStreams(now, peak, tuple(begin), {})


def on_two_streams(profile: RegionProfile, assigned: Assigned) -> TwoStreams:
    """Play a step out.

    Raises:
        ScheduleError: a weight gradient is to begin after a forward that waits for it, or not exactly once.
    """
    tasks, pairs = main_tasks(profile), profile.pairs()
    queue = [(layer, region) for region, layers in enumerate(assigned) for layer in layers]
    if sorted(layer for layer, _ in queue) != list(range(1, len(profile.layers))):
        raise ScheduleError("regions", "not every layer but the first once", "give each one region")
    first = [next(n for n, task in enumerate(tasks) if task.region == r) for r in range(len(profile.regions))]
    back = {task.layer: n for n, task in enumerate(tasks) if task.kind == "B"}
    waits = {layer: {x for x in profile.group(layer) if x} for layer in range(len(profile.layers))}
    now, at, left, work = 0.0, 0, tasks[0].seconds, inf
    ran: dict[int, tuple[float, float]] = {}
    begins: list[float] = []
    begun = 0.0
    while at < len(tasks):
        task = tasks[at]
        blocked = task.kind == "F" and any(x not in ran for x in waits[task.layer])
        if len(begins) == at and not blocked:
            begins.append(now)
        layer, region = queue[0] if queue else (0, 0)
        ready = bool(queue) and at >= first[region] and at > back[layer]
        if blocked and not ready:
            why = f"the forward of layer {task.layer} waits for weight gradients that begin after it"
            raise ScheduleError("regions", why, "put them into an earlier region")
        if ready and work == inf:
            begun, work = now, profile.layers[layer].weight_grad
        rate = ALONE
        if ready and not blocked:
            rate = profile.rates(task.region, layer, pairs[task.region, layer])
        passes = min(inf if blocked else left / rate.main, work / rate.sub if ready else inf)
        now += passes
        if not blocked:
            left -= passes * rate.main
        if ready:
            work -= passes * rate.sub
            if work <= NOTHING:
                ran[layer] = begun, now
                queue.pop(0)
                work = inf
        if not blocked and left <= NOTHING:
            at += 1
            left = tasks[at].seconds if at < len(tasks) else 0.0
    peak = _peak(profile, tasks, begins, [*begins[1:], now], ran)
    return TwoStreams(now, peak, tuple(begins[n] for n in first), ran)


def _peak(
    profile: RegionProfile,
    tasks: Sequence[_Main],
    begins: Sequence[float],
    ends: Sequence[float],
    ran: dict[int, tuple[float, float]],
) -> float:
    """Return the most that is held at the begin of a task, whose own activations count already."""
    kept = [cost.kept_bytes for cost in profile.layers]
    held = sum(kept)  # of the forward before
    peak, waiting = held, dict[int, float]()
    for task, begin, end in zip(tasks, begins, ends, strict=True):
        cost = profile.layers[task.layer]
        waiting = {layer: size for layer, size in waiting.items() if ran.get(layer, (0.0, inf))[1] > begin}
        if task.kind == "F":
            held += cost.kept_bytes
        peak = max(peak, held + sum(waiting.values()))
        if task.kind == "B":
            held -= cost.kept_bytes
            waiting[task.layer] = cost.waiting_bytes
            # At its end both its gradient and what already waited are there.
            alive = sum(size for layer, size in waiting.items() if layer == 0 or ran[layer][1] > end)
            peak = max(peak, held + alive)
        elif task.kind == "W":
            ran = {**ran, 0: (begin, end)}
    return peak
