"""Memory of a device's sharded stages beyond its share, task by task; it depends on the order only.

Level 3: the gathered weights, from AG to FREE. Levels 2 and 3: the full gradients, from the first weight gradient after
an RS to the end of the next RS. When that end comes does not follow from the order. A device makes sure of it where it
takes the next such buffer: it then waits for all reduce-scatters but the last one (``deps``), and at an AR or a U for
all. Until there the buffer counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import SHARDED, WEIGHT_GRADIENTS


class LiveShards:
    """Plays one device's order."""

    def __init__(self, schedule: Schedule, weights: Sequence[float], gradients: Sequence[float]) -> None:
        """Start with nothing gathered; ``weights`` and ``gradients`` are the full sizes of each stage's."""
        self.schedule, self._weights, self._sizes = schedule, weights, gradients
        self.gathered = 0.0
        """Gathered weights."""
        self.gradients = 0.0
        """Full gradients that are added to, or on their way."""
        self._open: set[tuple[int, int]] = set()
        self._scattering: list[float] = []

    def task(self, task: Task) -> None:
        """Begin the next task of the order."""
        kind, stage, _, replica = task
        level, key = self.schedule.zero_level(stage), (stage, replica)
        if kind in ("AR", "U"):
            self._ended(all_but=0)
        elif kind in WEIGHT_GRADIENTS and level >= 2 and key not in self._open:
            self._ended(all_but=1)
            self._open.add(key)
            self.gradients += self._sizes[stage]
        elif kind == "RS" and key in self._open:
            self._open.remove(key)
            self._scattering.append(self._sizes[stage])
        elif kind in SHARDED and kind != "RS" and level == 3:
            self.gathered += self._weights[stage] if kind == "AG" else -self._weights[stage]

    def _ended(self, all_but: int) -> None:
        while len(self._scattering) > all_but:
            self.gradients -= self._scattering.pop(0)
        if not self._scattering and not self._open:
            self.gradients = 0.0  # and no rounding goes on


def shard_peaks(schedule: Schedule, sizes: Sequence[float]) -> list[float]:
    """Return, per device, the most that gathered weights and full gradients take; ``sizes`` are those of each stage."""
    peaks = []
    for order in schedule.orders:
        live, most = LiveShards(schedule, sizes, sizes), 0.0
        for task in order:
            live.task(task)
            most = max(most, live.gathered + live.gradients)
        peaks.append(most)
    return peaks
