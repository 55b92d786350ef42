"""Running statistics (batch norm) of a device's stage replicas: summed over replicas, moved at the update."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from raypipe.models.running_statistics import move_all, part_of_step
from raypipe.runtime.stage.stage import StageModule
from raypipe.runtime.update.gradients import GradientSync, StageKey


class SummedStatistics:
    """What the stage replicas of a device have seen of a step's batch statistics.

    Args:
        modules: the stage replicas.
        sync: sums what ``seen`` returns beside their gradients.
        microbatches: micro-batches of a step.
    """

    def __init__(self, modules: Mapping[StageKey, StageModule], sync: GradientSync, microbatches: int) -> None:
        self._modules, self._sync, self._microbatches = modules, sync, microbatches

    def seen(self, key: StageKey, step: int) -> Tensor | None:
        """Return a replica's share of a step's batch statistics (``running_statistics``); None without any."""
        statistics = self._modules[key].statistics
        return part_of_step(statistics, step, self._microbatches) if statistics else None

    def move(self, key: StageKey, step: int) -> None:
        """Move a replica's on; called when the step's forwards are complete and final in all replicas."""
        total = self._sync.totals.pop(key, None)
        if total is None:
            total = self.seen(key, step)
        if total is not None:
            move_all(self._modules[key].statistics, total, step, self._microbatches)

    def forget(self, key: StageKey, step: int) -> None:
        """Leave a replica's as they are, after a step that makes no update."""
        self._sync.totals.pop(key, None)
        for one in self._modules[key].statistics:
            one.forget(step)

    def move_on(self, key: StageKey) -> None:
        """Move a replica's on by itself, where it is updated after every micro-batch."""
        for one in self._modules[key].statistics:
            one.move_on()
