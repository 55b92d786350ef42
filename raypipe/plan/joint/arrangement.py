"""Arrangements: a cut into stages together with the device of each.

Stages are runs of layers, in order, of any length; a device may hold any number of them, unequal ones too, anywhere
along the model. A line, a ring, a V and a W are arrangements, and so is everything between them. ``first_arrangements``
are lines, rings, Vs and Ws with laps of equal and of unequal length; ``StageTables`` has the times of stages of any
consecutive layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.cost.hosts import Placed
from raypipe.cost.kinds import room_bytes
from raypipe.cost.memory import parameter_bytes, stage_memory
from raypipe.cost.profile import Profile
from raypipe.cost.stages import message_seconds, split_seconds, trained_parameters
from raypipe.job.train_spec import TrainSpec
from raypipe.plan.candidate import Candidate

if TYPE_CHECKING:
    from raypipe.plan.joint.walk_kernel import Tables


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where each stage begins and which device holds it."""

    starts: tuple[int, ...]
    """First layer of each stage; the first is 0."""
    row: tuple[int, ...]
    """Device of each stage."""
    layers: int
    """Of the model."""

    @property
    def cut(self) -> tuple[range, ...]:
        """The layers of each stage."""
        return tuple(map(range, self.starts, (*self.starts[1:], self.layers)))

    def arrays(self, most_stages: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``starts`` and ``row`` as the kernels take them, with room for so many stages."""
        starts, row = np.zeros(most_stages, np.int64), np.zeros(most_stages, np.int64)
        starts[: len(self.row)], row[: len(self.row)] = self.starts, self.row
        return starts, row

    @staticmethod
    def of(starts: NDArray[np.int64], row: NDArray[np.int64], count: int, layers: int) -> Arrangement:
        """The same back."""
        return Arrangement(tuple(starts[:count].tolist()), tuple(row[:count].tolist()), layers)


def of_layers(devices: Sequence[int]) -> Arrangement:
    """The arrangement with the fewest stages in which each layer is on its device.

    >>> of_layers([0, 0, 1, 0])
    Arrangement(starts=(0, 2, 3), row=(0, 1, 0), layers=4)
    """
    starts = [0, *(i for i in range(1, len(devices)) if devices[i] != devices[i - 1])]
    return Arrangement(tuple(starts), tuple(devices[i] for i in starts), len(devices))


LAPS = (2, 3, 4)
"""Stages a device, beside one."""
THIN = 0.4
"""Share of an equal lap's work that a thin one has: the pipeline fills the faster, the thinner its first lap is."""


def first_arrangements(work: Sequence[float], devices: int, most_stages: int) -> Iterator[Arrangement]:
    """Yield a line, and rings, Vs and Ws of two laps and more, with equal laps and with a thin first one.

    Args:
        work: of each layer.
        devices: D.
        most_stages: deepest cut of the model.
    """
    down = list(range(devices))
    yield balanced(work, down, [1.0] * devices, devices)
    for laps in LAPS:
        if laps * devices > most_stages:
            return
        ring = down * laps
        vee = [d for lap in range(laps) for d in (down if lap % 2 == 0 else down[::-1])]
        for row in (vee, ring):
            for first in (1.0, THIN):
                wish = [first if s < devices else 1.0 for s in range(len(row))]
                yield balanced(work, row, wish, devices)


def balanced(work: Sequence[float], row: Sequence[int], wish: Sequence[float], devices: int) -> Arrangement:
    """Cut in the proportions wished for, then move borders while the slowest device becomes faster.

    Of equally slow ones, the squares of all devices' work decide.
    """
    count, layers = len(row), len(work)
    before = [0.0, *accumulate(work)]
    total, share = before[-1], list(accumulate(wish))
    starts = [0]
    for s in range(1, count):
        goal = total * share[s - 1] / share[-1]
        at = min(range(layers), key=lambda i: abs(before[i] - goal))
        starts.append(min(max(at, starts[-1] + 1), layers - (count - s)))
    best = _measure(before, starts, row, devices)
    better = True
    while better:
        better = False
        for s in range(1, count):
            for by in (-1, 1, -2, 2):
                low, high = starts[s - 1], starts[s + 1] if s + 1 < count else layers
                if low < starts[s] + by < high:
                    starts[s] += by
                    result = _measure(before, starts, row, devices)
                    if result < best:
                        best, better = result, True
                    else:
                        starts[s] -= by
            # A border next to single layers can only move with its neighbours.
            for first in range(1, s):
                for by in (-1, 1):
                    moved = [x + by if first <= k <= s else x for k, x in enumerate(starts)]
                    if all(a < b for a, b in zip(moved, [*moved[1:], layers], strict=True)):
                        result = _measure(before, moved, row, devices)
                        if result < best:
                            starts, best, better = moved, result, True
    return Arrangement(tuple(starts), tuple(row), layers)


def _measure(before: Sequence[float], starts: Sequence[int], row: Sequence[int], devices: int) -> tuple[float, float]:
    work = loads(before, starts, row, devices)
    return round(max(work) / before[-1], 9), sum(x * x for x in work) / before[-1] ** 2


def loads(before: Sequence[float], starts: Sequence[int], row: Sequence[int], devices: int) -> list[float]:
    """Per device, the work of its layers; ``before[i]`` is that of all layers before layer i, L + 1 values."""
    result = [0.0] * devices
    for a, b, device in zip(starts, [*starts[1:], len(before) - 1], row, strict=True):
        result[device] += before[b] - before[a]
    return result


class Stages(NamedTuple):
    """The stages of one arrangement, as ``search.chains`` takes them."""

    times: NDArray[np.float64]
    sizes: NDArray[np.float64]
    lag: NDArray[np.float64]
    cap: NDArray[np.float64]
    frozen: tuple[int, ...]


class StageTables:
    """Stages of one candidate: seconds as in ``stage_costs``, and bytes."""

    def __init__(self, profile: Profile, train: TrainSpec, c: Candidate) -> None:
        from raypipe.plan.joint.walk_kernel import Tables

        self.profile, self.c = profile, c
        self._each = parameter_bytes(profile.dtype, train.optimizer, train.momentum)
        layers, devices = len(profile.layers), c.stages
        placed = Placed.of([range(devices)], c.replicas, profile.placed, c.innermost)
        self._busy = placed.busy
        kinds = [placed.kinds((d,)) for d in range(devices)]
        self._known = sorted(set().union(*kinds))
        uses = np.array([[kind in own for kind in self._known] for own in kinds])
        message = message_seconds(profile, devices, c.replicas, c.innermost, float(c.microbatch))
        self.tables: Tables = Tables(
            np.full((layers, layers + 1, len(self._known), 3), np.nan),
            np.zeros((layers, layers + 1), np.bool_),
            np.zeros((layers, layers + 1, 5)),
            uses,
            np.array(message),
            np.array(room_bytes(profile, devices, c.replicas)),
        )

    def of(self, starts: NDArray[np.int64], row: NDArray[np.int64], count: int) -> Stages | None:
        """The stages of an arrangement; None where its weights and one micro-batch do not fit."""
        from raypipe.plan.joint import walk_kernel as kernel

        layers = len(self.profile.layers)
        for s in kernel.unknown(self.tables, starts, row, count).tolist():
            self._fill(int(starts[s]), int(starts[s + 1]) if s + 1 < count else layers)
        fits, times, sizes, lag, cap, frozen = kernel.stages(self.tables, starts, row, count, self.c.microbatches)
        return Stages(times, sizes, lag, cap, tuple(frozen.tolist())) if fits else None

    def _fill(self, x: int, y: int) -> None:
        own, profile, tables = range(x, y), self.profile, self.tables
        for k, kind in enumerate(self._known):
            tables.seconds[x, y, k] = split_seconds(profile.kinds[kind], own, self.c.microbatch, self._busy)
        tables.frozen[x, y] = not trained_parameters(profile, own)
        m = stage_memory(profile, own, self.c.microbatch, self._each, split=True)
        reads = self.c.microbatch * self.c.microbatches * self.c.replicas
        tables.memory[x, y] = (
            m.kept,
            m.kept_for_w,
            m.state + m.gradients + m.casts,
            m.workspace + m.messages,
            reads * max(profile.layers[i].read_bytes for i in own),
        )
