"""Split the lost time of measured steps by cause.

The ideal step has the undisturbed work of the measured one (forwards, both gradients, updates; nothing recomputed),
divided evenly over all devices, none of which ever waits. What a step takes above that is lost.

Every cause can be taken out of a replay of the step (``replay``). What taking out one gains depends on what has been
taken out before: of two devices that are slow alike, mending one alone gains nothing. So the causes are taken out one
after another in several orders (every rotation of one order, forwards and backwards), and a cause's seconds are the
mean of what it gained at its turn, as with Shapley's value. Warm-up and drain are what is left in the end. So the
seconds of all causes sum to the measured step minus the ideal one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypipe.explain.replay import MENDABLE, Cause, Mend, Replay
from raypipe.schedule.kinds import NETWORK

NOTHING = 1e-6
"""Share of a step below which a cause counts as none."""
REPLAYED_TASKS = 3_000_000
"""Most tasks that all replays of an explanation run, a few seconds; with larger steps, fewer orders are averaged and
devices' shares are estimated."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Seconds that one cause costs."""

    cause: Cause
    seconds: float
    """Per step."""
    what_if_step_s: float
    """Seconds of a step if this cause alone were mended."""
    devices: dict[int, float]
    """Its seconds by device; a link's by the device that receives."""
    links: dict[tuple[int, int], float]
    """Of ``link``: its seconds by (sender, receiver)."""

    @property
    def device(self) -> int | str | None:
        """Where most of it is: a device, a link as ``0->1``, or None for all devices alike."""
        if self.links:
            return "{}->{}".format(*max(self.links, key=lambda pair: self.links[pair]))
        if self.cause == "warm-up" or not self.devices:
            return None
        return max(self.devices, key=lambda d: self.devices[d])

    def as_json(self) -> dict[str, Any]:
        """Return the fields of one entry of ``causes``."""
        result: dict[str, Any] = {
            "cause": self.cause,
            "device": self.device,
            "seconds": self.seconds,
            "what_if_step_s": self.what_if_step_s,
            "devices": {str(d): s for d, s in sorted(self.devices.items())},
        }
        return result | ({"links": {f"{a}->{b}": s for (a, b), s in self.links.items()}} if self.links else {})


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where the time of a step went."""

    step_s: float
    ideal_s: float
    causes: tuple[Lost, ...]
    """Largest first; their seconds sum to ``step_s - ideal_s``."""

    def of(self, cause: Cause) -> Lost | None:
        """Return what one cause costs; None if nothing."""
        return next((lost for lost in self.causes if lost.cause == cause), None)


def explain(replay: Replay) -> Explanation:
    """Split the lost time of the replay's steps by cause."""
    whole, ideal = replay.measured_s, replay.ideal_s
    replayed = replay.step_s()
    rest = whole - replayed
    tasks = len(replay.steps) * len(replay.waits.graph.tasks)
    active = [c for c in MENDABLE if _matters(replay, c)]
    seconds = _averaged(replay, active, few=tasks * 2 * max(1, len(active)) ** 2 > REPLAYED_TASKS)
    seconds["warm-up"] = replay.step_s([Mend(c) for c in active]) - ideal
    seconds["host"] = seconds.get("host", 0.0) + rest
    result = []
    budget = REPLAYED_TASKS // max(1, tasks)
    for cause, lost in seconds.items():
        if abs(lost) > NOTHING * whole or cause == "warm-up":
            what_if = whole - (replayed - replay.step_s([Mend(cause)])) - (rest if cause == "host" else 0.0)
            devices, links = _where(replay, cause, lost, budget)
            result.append(Lost(cause, lost, max(what_if, 0.0), devices, links))
    return Explanation(whole, ideal, tuple(sorted(result, key=lambda one: -one.seconds)))


def _matters(replay: Replay, cause: Cause) -> bool:
    """Return whether mending a cause changes any time of the replay, alone or once all others are mended."""
    every = [Mend(c) for c in MENDABLE]
    others = [m for m in every if m.cause != cause]
    limit = NOTHING * replay.step_s()
    return (
        abs(replay.step_s() - replay.step_s([Mend(cause)])) > limit
        or abs(replay.step_s(others) - replay.step_s(every)) > limit
    )


def _averaged(replay: Replay, causes: Sequence[Cause], few: bool) -> dict[Cause, float]:
    """Per cause, the mean of what taking it out gains, over orders of all of them."""
    turns = [[*causes[k:], *causes[:k]] for k in range(1 if few else len(causes))]
    orders = [order for turn in turns for order in (turn, turn[::-1])]
    sums: dict[Cause, float] = dict.fromkeys(causes, 0.0)
    for order in orders:
        mended: list[Mend] = []
        before = replay.step_s()
        for cause in order:
            mended.append(Mend(cause))
            after = replay.step_s(mended)
            sums[cause] += (before - after) / len(orders)
            before = after
    return sums


def _where(
    replay: Replay, cause: Cause, seconds: float, budget: int
) -> tuple[dict[int, float], dict[tuple[int, int], float]]:
    """A cause's seconds by device, and those of messages by link.

    They are in proportion to what mending it there alone gains; where that is nothing (or takes too long to find out),
    to how much of it is there.
    """
    devices = range(replay.of.schedule.devices)
    if cause == "warm-up":
        return dict.fromkeys(devices, seconds / len(devices)), {}
    if cause == "link":
        pairs = sorted(
            {pair for source in replay.waits.messages for _, pair in source}
            | {pair for source in replay.waits.late_messages for _, pair in source}
        )
        weights = _gains(replay, [Mend(cause, pair) for pair in pairs], budget)
        if sum(weights) <= 0:
            weights = [_lag(replay, pair) for pair in pairs]
        total = sum(weights) or 1.0
        links = {pair: seconds * w / total for pair, w in zip(pairs, weights, strict=True) if w > 0}
        by_device: dict[int, float] = {}
        for (_, receiver), share in links.items():
            by_device[receiver] = by_device.get(receiver, 0.0) + share
        return by_device, links
    weights = _gains(replay, [Mend(cause, d) for d in devices], budget)
    if sum(weights) <= 0:
        weights = _amounts(replay, cause)
    total = sum(weights)
    if total <= 0:
        return {}, {}
    return {d: seconds * w / total for d, w in zip(devices, weights, strict=True) if w > 0}, {}


def _gains(replay: Replay, mends: Sequence[Mend], budget: int) -> list[float]:
    """Seconds that each mend alone gains, at least 0; zeros if there are too many of them."""
    if len(mends) > budget // 10:
        return [0.0] * len(mends)
    whole = replay.step_s()
    return [max(0.0, whole - replay.step_s([m])) for m in mends]


def _lag(replay: Replay, pair: tuple[int, int]) -> float:
    device = replay.waits.graph.device
    return sum(
        lag
        for step in replay.steps
        for (p, i), lag in (*step.lags.items(), *step.late_lags.items())
        if (device[p], device[i]) == pair
    )


def _amounts(replay: Replay, cause: Cause) -> list[float]:
    """Per device, how much of a cause its tasks have."""
    devices = replay.of.schedule.devices
    result = [0.0] * devices
    if cause == "imbalance":
        work = replay.device_work_s[replay.counted].mean(axis=0)
        return [max(0.0, float(w) - replay.ideal_s) for w in work]
    kinds = {"recompute": ("R",), "sync": ("AR", "RS"), "gather": ("AG",)}.get(cause, ())
    waits = {"sync": "sums", "host": "host", "data": "data", "norm": "norm"}.get(cause)
    for k, one in enumerate(replay.steps):
        for i, task in enumerate(replay.waits.graph.tasks):
            d = replay.waits.graph.device[i]
            if cause == "straggler" and task.kind not in NETWORK:
                result[d] += max(0.0, float(one.work[i] - replay.base[k, i]))
            if task.kind in kinds:
                result[d] += float(one.work[i])
            if waits is not None:
                result[d] += float(getattr(one, waits)[i])
    return result
