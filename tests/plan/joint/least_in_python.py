"""Least steps in plain Python, as the kernel is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from raypipe.plan.certificate.instance import Instance
from raypipe.plan.joint.arrangement import Arrangement


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of all layers before each, on one kind of device."""

    forward: Sequence[float]
    input_grad: Sequence[float]
    weight_grad: Sequence[float]


class InPython:
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

        result = []
        for d, held in enumerate(own):
            if not held:
                result.append(0.0)
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
            result.append(least)
        return result
