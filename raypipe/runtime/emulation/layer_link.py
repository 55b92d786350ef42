"""Emulated data parallelism layer by layer: no barrier between steps, and sums in the order of their urgency."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raypipe.runtime.emulation.emulated_worker import LayerSums
from raypipe.runtime.update.issue_order import prioritised_order
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.passes import replicate
from raypipe.simulate.layer_sync import LayerSync, layer_step_ends, layer_step_time


@dataclass(frozen=True, slots=True)
class LayerLink:
    """How the sums of data-parallel copies whose stages are layers share their link."""

    sync: LayerSync
    piece_s: float = math.inf
    """Time of the pieces in which prioritised sums are sent, in seconds."""

    def copies_of(self, base: Schedule, copies: int) -> Schedule:
        """The step of all copies; ``base`` is that of one (``families.reverse_first_k``)."""
        order = base.orders[0]
        if self.sync == "lazy":
            order = (*(t for t in order if t.kind != "AR"), *(t for t in order if t.kind == "AR"))
        return replicate(base.with_orders([order]), copies)

    def sums(self, schedule: Schedule, costs: CostTable) -> LayerSums:
        """What a device needs. Its pieces go in the order that the runtime would issue them in: all holders compute it
        beforehand, from when gradients are complete (``issue_order``)."""
        order = list(schedule.orders[0])
        now, position, complete = 0.0, dict[int, int](), dict[int, float]()
        for n, (task, seconds) in enumerate(zip(order, costs.durations(schedule, order), strict=True)):
            if task.kind == "AR":
                position[task.stage], complete[task.stage] = n, now
            else:
                now += seconds
        pieces = []
        for layer in sorted(position) if self.sync == "prioritised" else position:
            count = max(1, math.ceil(costs.all_reduce[layer] / self.piece_s)) if self.sync == "prioritised" else 1
            pieces += [(layer, costs.all_reduce[layer] / count)] * count
        if self.sync == "prioritised":
            urgent = prioritised_order([complete[layer] for layer, _ in pieces], [seconds for _, seconds in pieces])
            pieces = [pieces[n] for n in urgent]
        forwards = {n: position[t.stage] for n, t in enumerate(order) if t.kind == "F" and t.stage in position}
        return LayerSums(tuple((position[layer], seconds) for layer, seconds in pieces), forwards)

    def step_ends(self, schedule: Schedule, costs: CostTable, steps: int) -> list[float]:
        """Predict when each step's last computation ends, by a link with a priority queue."""
        return layer_step_ends(self._one(schedule), costs, self.sync, steps, self._piece)

    def steady_s(self, schedule: Schedule, costs: CostTable) -> float:
        """Predict the time per step in the long run."""
        return layer_step_time(self._one(schedule), costs, self.sync, self._piece)

    @property
    def _piece(self) -> float | None:
        return self.piece_s if math.isfinite(self.piece_s) else None

    def _one(self, schedule: Schedule) -> Schedule:
        return schedule.with_orders([schedule.orders[0]], placement=schedule.placement[:1], microbatches=1)
