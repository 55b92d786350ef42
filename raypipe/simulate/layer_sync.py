"""Pure data parallelism layer by layer, over a link that serves one sum at a time: four ways to synchronise.

``schedule.walk`` issues collectives in the device's order, first come, first served. Here the link may also have a
priority queue, in pieces, as BytePS and ByteScheduler have: what the next forward needs first goes first.
"""

from __future__ import annotations

from typing import Literal, get_args

from raypipe.errors import ScheduleError, nearest
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule

LayerSync = Literal["lazy", "wait-free", "prioritised"]
"""When a layer's sum may start, and which goes first. ``lazy``: after the backward, in the order of their AR tasks;
``wait-free``: at its AR, first come, first served; ``prioritised``: at its AR, the layer nearest to the input first.
Reverse first-k is an order of tasks (``families.reverse_first_k``) under ``prioritised``."""
_WARM, _STEPS = 8, 24


class _SumLink:
    """Sums that wait for the link or are on it; it works as far as it is asked to."""

    def __init__(self, durations: tuple[float, ...], priority: bool, piece: float | None) -> None:
        self.durations, self.priority, self.piece = durations, priority, piece
        self.now = 0.0
        self.left: dict[int, float] = {}
        """Layer -> what is left of its sum, in the order of arrival."""
        self.done: dict[int, float] = {}

    def arrive(self, layer: int, at: float) -> None:
        """A sum may start at ``at``, no sooner than any before it."""
        self._work(at)
        self.now = max(self.now, at)
        self.left[layer] = self.durations[layer]
        self.done.pop(layer, None)

    def end(self, layer: int) -> float:
        """When the layer's sum is complete, if nothing else arrives before; the caller waits for it."""
        while layer in self.left:
            self._serve()
        return self.done[layer]

    def _work(self, until: float) -> None:
        while self.left and self.now < until:
            self._serve(until)

    def _serve(self, until: float = float("inf")) -> None:
        """Send one piece; without pieces, as much of a prioritised sum as there is time for."""
        layer = min(self.left) if self.priority else next(iter(self.left))
        most = self.left[layer]
        if self.priority:
            most = min(most, self.piece) if self.piece is not None else min(most, max(0.0, until - self.now))
        self.now += most
        self.left[layer] -= most
        if self.left[layer] <= 1e-12 * self.durations[layer]:
            del self.left[layer]
            self.done[layer] = self.now


def layer_step_time(schedule: Schedule, costs: CostTable, sync: LayerSync, piece: float | None = None) -> float:
    """Return the steady time per step of a data-parallel copy whose stages are layers: the mean of 24 after 8.

    The arguments are those of ``layer_step_ends``.
    """
    ends = layer_step_ends(schedule, costs, sync, _WARM + _STEPS, piece)
    return (ends[-1] - ends[_WARM - 1]) / _STEPS


def layer_step_ends(
    schedule: Schedule, costs: CostTable, sync: LayerSync, steps: int, piece: float | None = None
) -> list[float]:
    """Return when the last computation of each step ends, of a data-parallel copy whose stages are layers.

    A layer's forward waits for its own sum of the step before, and for nothing else of it: there is no barrier at the
    optimizer. Copies are alike, so one stands for all.

    Args:
        schedule: of one device, with an AR per layer right where its gradient is complete.
        costs: per layer, with ``all_reduce``.
        sync: how sums are ordered.
        steps: number of steps.
        piece: time of the pieces in which a prioritised sum is sent; a more urgent one waits for the end of a piece.
            None: sums can be interrupted at any time.

    Raises:
        ScheduleError: several devices, or an unknown ``sync``.

    Source: Oh et al. 2022 (OOO backprop), section 5.1; Peng et al. 2019 (ByteScheduler).
    """
    if schedule.devices != 1:
        raise ScheduleError("schedule", f"{schedule.devices} devices", "give the step of one data-parallel copy")
    if sync not in get_args(LayerSync):
        raise ScheduleError("sync", f'"{sync}" is unknown', nearest(str(sync), get_args(LayerSync)))
    if piece is not None and piece <= 0:
        raise ScheduleError("piece", f"{piece} is no time", "use a number above 0, or None")
    tasks = list(schedule.orders[0])
    durations = costs.durations(schedule, tasks)
    link = _SumLink(costs.all_reduce, sync == "prioritised", piece)
    last = max((n for n, t in enumerate(tasks) if t.kind != "AR"), default=0)
    late = [t.stage for t in tasks if t.kind == "AR"] if sync == "lazy" else []
    summed: set[int] = set()
    now, ends = 0.0, []
    for _ in range(steps):
        for n, (task, duration) in enumerate(zip(tasks, durations, strict=True)):
            if task.kind == "AR":
                if sync != "lazy":
                    link.arrive(task.stage, now)
                    summed.add(task.stage)
                continue
            if task.kind == "F" and task.stage in summed:
                now = max(now, link.end(task.stage))
                summed.discard(task.stage)
            now += duration
            if n == last:
                for layer in late:
                    link.arrive(layer, now)
                summed.update(late)
        ends.append(now)
    return ends
