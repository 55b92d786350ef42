"""How short a step of an arrangement could be, without an order: a few microseconds a stage, where an order takes
milliseconds.

Per device, the largest of what ``plan/certificate/assigned`` asks of every assignment of layers, here with the stages
and the messages that the arrangement has: work after the first F; forwards of later stages and backwards, which come
later, less the early forwards that fit into memory; the way out, less the weight gradients that fit; and activations'
bytes times seconds. Orders come within a few per cent of it, so that it ranks arrangements, and finds good ones by
simulated annealing (Kirkpatrick, Gelatt, Vecchi 1983) before any has an order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, inf

from raypipe.plan.certificate.instance import Instance
from raypipe.plan.joint.arrangement import Arrangement, random_move

WARM, COLD = 0.01, 2e-4
"""First and last temperature, as shares of the step."""
SMOOTH = 80
"""Power of the mean over devices: the slowest counts most, and the others a little."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of all layers before each, on one kind of device."""

    forward: Sequence[float]
    input_grad: Sequence[float]
    weight_grad: Sequence[float]


def smooth(times: Sequence[float]) -> float:
    """A mean of devices' times that is close to the largest, and falls with the others, too."""
    most = max(times)
    if most == inf or not most:
        return most
    mean: float = sum((x / most) ** SMOOTH for x in times) / len(times)
    return most * float(mean ** (1 / SMOOTH))


class LeastStep:
    """Bounds on arrangements of one instance."""

    def __init__(self, i: Instance) -> None:
        def sums(values: Sequence[float]) -> list[float]:
            return [0.0, *accumulate(values)]

        self.i = i
        self.kinds = [
            _Sums(
                sums(k.forward), sums(k.input_grad),
                sums([b - g for b, g in zip(k.backward, k.input_grad, strict=True)]),
            )
            for k in i.kinds
        ]  # fmt: skip
        self.kept, self.state = sums(i.kept), sums(i.full_state)
        self.limited = any(room < inf for room in i.room)

    def of(self, a: Arrangement) -> float:
        """No order of the arrangement has a shorter step; infinite where its weights do not fit."""
        return max(self.devices(a))

    def smooth(self, a: Arrangement) -> float:
        """The bounds of all devices together, the largest counting most."""
        return smooth(self.devices(a))

    def devices(self, a: Arrangement) -> list[float]:
        """The bound of each device."""
        i, n, row = self.i, self.i.microbatches, a.row
        count = len(row)
        forward, back, weight, kept = ([0.0] * count for _ in range(4))
        start = [0.0] * count
        there, round_trip, longest = forward, back, 0.0
        """The longest task of a micro-batch on its way to each stage's F, and to its B. Without a barrier the devices
        before it may have begun long before, so that only the stage's own count."""
        if i.barrier:
            there, round_trip = [0.0] * count, [0.0] * count
        own: list[list[int]] = [[] for _ in range(i.devices)]
        state = [0.0] * i.devices
        ends = (*a.starts[1:], a.layers)
        at = 0.0
        for s, d in enumerate(row):
            x, y, of = a.starts[s], ends[s], self.kinds[i.kind_of[d]]
            forward[s] = of.forward[y] - of.forward[x]
            back[s] = of.input_grad[y] - of.input_grad[x]
            weight[s] = of.weight_grad[y] - of.weight_grad[x]
            kept[s] = self.kept[y] - self.kept[x]
            state[d] += self.state[y] - self.state[x]
            own[d].append(s)
            if s and row[s - 1] != d:
                at += i.message
            start[s] = at
            at += forward[s]
            if i.barrier:
                there[s] = longest = max(longest, forward[s])
        returns = [0.0] * count
        """When each stage's B can begin."""
        for s in range(count - 1, -1, -1):
            if s + 1 < count and row[s + 1] != row[s]:
                at += i.message
            returns[s] = at
            if i.barrier:
                round_trip[s] = longest = max(longest, back[s])
            at += back[s]
        whole = at + weight[0]

        def supply(task: float, t: float, longest: float) -> float:
            """Seconds of a stage's tasks that may have run in the time since the first of them could begin."""
            return min(n * task, task * (1 + t / longest)) if longest else n * task

        found = []
        for d, held in enumerate(own):
            if not held:
                found.append(0.0)
                continue
            room = i.room[d] - state[d]
            if self.limited and room < sum(kept[s] for s in held):
                return [inf] * i.devices
            first, last = held[0], held[-1]
            work = n * sum(forward[s] + back[s] + weight[s] for s in held)
            begin = start[first] if i.barrier else 0.0
            shift = begin - start[first]
            least = begin + work
            ratio, until = 0.0, [*(start[s] for s in held[1:]), returns[last]]
            for k, (s, t) in enumerate(zip(held, until, strict=True)):
                # Until the next stage's first F, or the first backward, forwards up to stage s run alone.
                early = sum(supply(forward[e], t - start[e], there[e]) for e in held[: k + 1])
                ratio = max(ratio, forward[s] / kept[s] if kept[s] else inf)
                fits = min(early, room * ratio) if self.limited else early
                least = max(least, shift + t + work - fits)
            for k, s in enumerate(held[:-1]):
                # Until stage s's first backward, forwards and later stages' backwards run alone.
                t = returns[s]
                early = sum(supply(forward[e], t - start[e], there[e]) for e in held)
                early += sum(supply(back[e] + weight[e], t - returns[e], round_trip[e]) for e in held[k + 1 :])
                least = max(least, shift + t + work - early)
            if i.barrier:
                late = n * sum(weight[s] for s in held)
                if self.limited:
                    late = min(late, room * max(weight[s] / kept[s] if kept[s] else inf for s in held))
                out = whole - returns[first] - back[first] if first else 0.0
                least = max(least, begin + work - late + out, returns[last] + work - fits - late + out)
            if self.limited and room > 0:
                area = sum(kept[s] * (returns[s] + back[s] - start[s] + weight[s]) for s in held)
                least = max(least, n * area / room)
            found.append(least)
        return found


def annealed(
    least: LeastStep, a: Arrangement, most_stages: int, tries: int, rng: random.Random,
    borders: float = 1.0,
) -> list[Arrangement]:  # fmt: skip
    """Return the best arrangements on a random walk that grows colder, the best first.

    Args:
        least: what is minimised.
        a: where the walk begins.
        most_stages: deepest cut.
        tries: moves that are tried.
        rng: draws them.
        borders: share of them that move borders and leave devices as they are.
    """
    value = least.smooth(a)
    best = {a: value}
    devices = least.i.devices
    for k in range(tries):
        other = random_move(a, devices, most_stages, rng, borders)
        if other is None:
            continue
        new = least.smooth(other)
        heat = WARM * (COLD / WARM) ** (k / tries)
        if new < value or (new < inf and rng.random() < exp((value - new) / (heat * value))):
            a, value = other, new
            if new < inf:
                best[a] = new
                if len(best) > 200:
                    for worst in sorted(best, key=best.__getitem__)[60:]:
                        del best[worst]
    return sorted(best, key=best.__getitem__)
