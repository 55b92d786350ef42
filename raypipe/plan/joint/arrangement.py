"""Arrangements: a cut into stages together with the device of each.

Stages are runs of layers, in order, of any length; a device may hold any number of them, unequal ones too, anywhere
along the model. A line, a ring, a V and a W are arrangements, and so is everything between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
