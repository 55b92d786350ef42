"""A lower bound from layers being whole: devices cannot share them evenly.

No device's work is more than the largest sum of whole layers that fits into a step, beside the time before it can
begin; these together must hold all layers. The device with the longest layer l, most often a head of a large
vocabulary, has less room: as ``assigned`` proves, l and the backwards of whatever else that device has all come after
the forwards of the layers before l. Sums of layers are found as bits of one long integer (subset sums).

With 26 equal blocks and a head of six and a half on four devices: either three devices share 24 of them, eight each,
and two are with the head, or one has nine. Evenly shared it would be 8.1 each.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from raypipe.plan.certificate.instance import Instance

UNITS = 8192
"""Units of time in an evenly shared step; layers are rounded down to them."""
MOST = 1.5
"""Times the evenly shared step, up to which the bound is looked for."""
HALVINGS = 24
LARGE = 4_000
"""Layers times devices above which devices have so many layers each that whole ones matter little."""


def whole_layers(i: Instance, starts: Sequence[float], shared: float) -> float:
    """Return the bound, at least ``shared``; that itself where devices differ or the instance is large.

    Args:
        i: the instance.
        starts: per device, in the order of their first layers, the least time at which it begins.
        shared: a lower bound from all work shared evenly, overheads included.
    """
    if not i.alike or i.devices == 1 or i.layers * i.devices > LARGE or not i.layers or shared <= 0:
        return shared
    return _Packing(i, starts[: i.layers], shared).bound()


class _Packing:
    """The layers' work as whole units, and the sums of them."""

    def __init__(self, i: Instance, starts: Sequence[float], shared: float) -> None:
        n, least = i.microbatches, i.least
        self.i, self.starts, self.shared, self.unit = i, starts, shared, shared / UNITS
        barrier = i.barrier and i.flushes
        seconds = [n * w + (0.0 if barrier else u) for w, u in zip(least.work, least.update, strict=True)]
        self.sizes = [floor(x / self.unit) for x in seconds]
        self.top = max(range(i.layers), key=lambda s: seconds[s])
        rest = [s for s in range(i.layers) if s != self.top]
        self.sums = _sums([self.sizes[s] for s in rest])
        self.overhead = i.tasks * n * least.overhead
        self.late: float | None = None
        """Seconds before the longest layer's device may begin with that layer or a backward, and their part of it."""
        backward = [n * least.backward[s] for s in rest]
        if barrier and min(backward, default=0.0) > 0:
            self.late = i.ahead[self.top] + n * least.work[self.top] + (i.tasks - 1) * n * least.overhead
            self.backward_sums = _sums([floor(x / self.unit) for x in backward])
            self.most = max(seconds[s] / x for s, x in zip(rest, backward, strict=True))
            """Work per second of backward."""

    def bound(self) -> float:
        """Halve the interval between a step that is too short and one that may not be."""
        low, high = self.shared, MOST * self.shared
        if self.holds_all(low):
            return low
        if not self.holds_all(high):
            return high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.holds_all(middle) else (middle, high)
        return low

    def holds_all(self, step: float) -> bool:
        """Return whether all layers may fit into a step of this length, the longest on the best device for that."""
        rooms = [floor((step - start - self.overhead) / self.unit + 1e-6) for start in self.starts]
        each = [_largest(self.sums, room) for room in rooms]
        own, limit = self.sizes[self.top], self.beside(step)
        total, together = sum(self.sizes), sum(each)
        for room, without in zip(rooms, each, strict=True):
            left = min(room - own, limit)
            if left >= 0 and together - without + own + _largest(self.sums, left) >= total:
                return True
        return False

    def beside(self, step: float) -> int:
        """Units of other layers' work that the longest layer's device may have, as far as backwards limit it."""
        if self.late is None:
            return 2 * UNITS
        left = floor((step - self.late) / self.unit + 1e-6)
        if left < 0:
            return -1
        most = _largest(self.backward_sums, left) + self.i.layers  # each was rounded down by less than a unit
        return floor(self.most * most)


def _sums(sizes: Sequence[int]) -> int:
    """An integer whose bit k is set if some of these sizes add up to k, as far as any step needs."""
    mask = (1 << int(MOST * UNITS) + 2) - 1
    found = 1
    for size in sizes:
        found |= (found << size) & mask
    return found


def _largest(sums: int, room: int) -> int:
    """The largest sum that is no more than this."""
    return (sums & ((1 << room + 1) - 1)).bit_length() - 1 if room >= 0 else 0
