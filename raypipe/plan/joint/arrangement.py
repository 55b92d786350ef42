"""Arrangements: a cut into stages together with the device of each, and the moves from one to the next.

Stages are runs of layers, in order, of any length; a device may hold any number of them, unequal ones too, anywhere
along the model. A line, a ring, a V and a W are arrangements, and so is everything between them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


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

    @property
    def devices(self) -> int:
        """Devices up to the last that holds a stage."""
        return 1 + max(self.row)

    @property
    def per_layer(self) -> list[int]:
        """The device of each layer."""
        return [device for own, device in zip(self.cut, self.row, strict=True) for _ in own]

    def loads(self, before: Sequence[float], devices: int) -> list[float]:
        """Per device, the work of its layers; ``before[i]`` is that of all layers before layer i, L + 1 values."""
        found = [0.0] * devices
        for a, b, device in zip(self.starts, (*self.starts[1:], self.layers), self.row, strict=True):
            found[device] += before[b] - before[a]
        return found


def of_layers(devices: Sequence[int]) -> Arrangement:
    """The arrangement with the fewest stages in which each layer is on its device.

    >>> of_layers([0, 0, 1, 0])
    Arrangement(starts=(0, 2, 3), row=(0, 1, 0), layers=4)
    """
    starts = [0, *(i for i in range(1, len(devices)) if devices[i] != devices[i - 1])]
    return Arrangement(tuple(starts), tuple(devices[i] for i in starts), len(devices))


def _stage(a: Arrangement, rng: random.Random, device: int | None) -> int:
    """Any stage, or one of a device that has one."""
    return rng.choice([s for s, d in enumerate(a.row) if device is None or d == device])


def random_border(a: Arrangement, rng: random.Random, device: int | None = None) -> Arrangement | None:
    """A border of any stage, or of one of a device's, moved by one layer, or several in a row; None where there is no
    room."""
    count = len(a.row)
    if count < 2:
        return None
    s = min(count - 1, max(1, _stage(a, rng, device) + rng.randrange(2)))
    until = min(count, s + rng.choice((1, 1, 1, 2, 3, 5)))
    by = rng.choice((-1, 1))
    starts = (*a.starts[:s], *(x + by for x in a.starts[s:until]), *a.starts[until:])
    follows = starts[until] if until < count else a.layers
    if starts[s] <= starts[s - 1] or starts[until - 1] >= follows:
        return None
    return Arrangement(starts, a.row, a.layers)


def random_move(
    a: Arrangement, devices: int, most_stages: int, rng: random.Random, borders: float = 0.5,
    device: int | None = None,
) -> Arrangement | None:  # fmt: skip
    """An arrangement one move away that leaves no device without a layer; None where what is drawn is none.

    A border moves, or several in a row do; a stage changes its device, or two swap theirs; a stage is divided, and one
    part of it goes elsewhere; a stage joins the one before or behind it.

    Args:
        a: where to move from.
        devices: D.
        most_stages: deepest cut.
        rng: draws the move.
        borders: share of the moves that move borders.
        device: whose stages move; by default any.
    """
    if rng.random() < borders:
        return random_border(a, rng, device)
    starts, row, count = a.starts, a.row, len(a.row)
    ends = (*starts[1:], a.layers)
    s, draw = _stage(a, rng, device), rng.random()
    found: Arrangement | None = None
    if draw < 0.3:
        t = rng.randrange(count)
        if row[s] != row[t]:
            swapped = list(row)
            swapped[s], swapped[t] = row[t], row[s]
            return Arrangement(starts, tuple(swapped), a.layers)
    elif draw < 0.6:
        found = Arrangement(starts, (*row[:s], rng.randrange(devices), *row[s + 1 :]), a.layers)
    elif draw < 0.8:
        size = ends[s] - starts[s]
        if count < most_stages and size > 1:
            at, d = starts[s] + rng.randrange(1, size), rng.randrange(devices)
            pair = (d, row[s]) if rng.random() < 0.5 else (row[s], d)
            found = Arrangement((*starts[: s + 1], at, *starts[s + 1 :]), (*row[:s], *pair, *row[s + 1 :]), a.layers)
    elif s:
        gone = s if rng.random() < 0.5 else s - 1
        found = Arrangement((*starts[:s], *starts[s + 1 :]), (*row[:gone], *row[gone + 1 :]), a.layers)
    return found if found is not None and found != a and len(set(found.row)) == devices else None
