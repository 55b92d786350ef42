"""Chooses k of reverse first-k for one stage while it trains, from what its holders have measured.

A stage's holders tell one another when each layer's gradient is complete, how fast the link is, and how long steps
take; each feeds the same numbers to a tuner of its own, so all of them choose the same. The choice is the planner's:
by the simulated steps of the k that are worth trying (``layer_step_time``), of those that the devices' memory
allows (``most_postponed``). Then steps with it are measured, and it is taken back where they are not shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from raypipe.errors import ScheduleError, nearest
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.out_of_order import HeldMemory, most_postponed, postponed_peaks, reverse_first_k
from raypipe.schedule.ir import Schedule


@dataclass(frozen=True, slots=True)
class BestFirstK:
    """The best k that was tried."""

    k: int
    """Layers whose dW is postponed; 0: the usual backward, which nothing tried was faster than."""
    seconds: float
    """Time of a step with it."""
    tried: dict[int, float]
    """Every k that was tried, and its time."""


def tune_first_k(seconds: Callable[[int], float], most: int, coarse: int = 8, gain: float = 0.0) -> BestFirstK:
    """Find a good k with few trials: evenly spaced ones first, then ever closer ones around the best.

    A step's time falls with k while sums are still exposed and rises when the link starts to idle, with steps where
    layers are uneven; so the neighbourhood of the best evenly spaced k is searched, in steps that halve.

    Args:
        seconds: time of a step with this k; 0 is the usual backward, to which everything is compared.
        most: largest k, as memory allows.
        coarse: evenly spaced values to begin with.
        gain: share by which a step must be faster than the usual one for any k above 0, such as measurements' noise.

    Source: Oh et al. 2022 (OOO backprop), section 5.1: "to find the optimal k, we profile the executions of the
    schedules with multiple k values"; the return to k = 0 is for models that become slower (its section 7.3).
    """
    tried: dict[int, float] = {0: seconds(0)}

    def best() -> int:
        return min(tried, key=lambda k: (tried[k], k))

    def attempt(k: int) -> None:
        if k not in tried and 0 < k <= most:
            tried[k] = seconds(k)

    for n in range(1, coarse + 1):
        attempt(round(n * most / coarse))
    stride = max(1, most // coarse)
    while stride:
        centre = best()
        attempt(centre - stride)
        attempt(centre + stride)
        if best() == centre:
            stride //= 2
    k = best()
    if tried[k] >= tried[0] * (1 - gain):
        k = 0
    return BestFirstK(k, tried[k], tried)


TRY_AT, JUDGE_AT = 8, 16
"""Numbers of steps after which a k is chosen, and after which it is judged: earlier steps are slow, and the order of
sums settles in them."""
UPDATED = 2
"""The first step that holds an optimizer's state: the update of the step before has made it."""
GAIN = 0.01
"""Share by which a simulated step must be shorter for any k above 0."""


class FirstKTuner:
    """Chooses k of one stage.

    Args:
        layers: layers with parameters.
        fixed: what the job gives; None to choose it.
        memory: bytes that the stage's holders may have allocated each, the least of them. With a ``fixed`` k,
            nothing is postponed at first, and what is held then says how much of k fits. None: no limit.
    """

    def __init__(self, layers: int, fixed: int | None = None, memory: float | None = None) -> None:
        self.layers, self.memory = layers, memory
        self._fixed = fixed
        self.k = min(fixed or 0, layers) if memory is None else 0
        """How many layers' weight gradients are postponed."""
        self.most = layers
        """The largest k that memory allows, as far as that is known."""
        self.peaks: list[float] = []
        """Bytes that a holder has allocated at its fullest in the backward, by k; empty as long as that is unknown."""
        self._settled = (fixed is not None and (memory is None or not fixed)) or (fixed is None and layers < 2)
        self._before: tuple[list[float], float] | None = None
        """When gradients were complete with k = 0, and how long a step took."""

    @property
    def wants_memory(self) -> bool:
        """Return whether ``observe`` has use for what is held in a step."""
        return self.memory is not None and not self._settled and self.k == 0

    def observe(
        self, step: int, ready: Sequence[float], sums: Sequence[float], seconds: float, held: HeldMemory | None = None
    ) -> list[float]:
        """Take in what was measured until a step; returns when gradients will be complete from now on.

        Args:
            step: its number, from 1; 1, 2, 4, 8, ...
            ready: per layer, when its gradient was complete, in seconds since the last backward began.
            sums: per layer, how long the link takes for its sum.
            seconds: of a step, typically, since the last report.
            held: what the backward holds, the most of any holder; None where it was not measured.
        """
        if self._settled:
            return list(ready)
        if self.memory is not None and step < UPDATED:
            return list(ready)
        if self.memory is not None and held is not None and self.k == 0:
            self.peaks = postponed_peaks(held)
            self.most = min(self.most, most_postponed(held, self.memory))
        if self._fixed is not None:
            self.k, self._settled = min(self._fixed, self.most), True
            return complete_at(layer_costs(ready, sums), self.k) if self.k else list(ready)
        if step >= JUDGE_AT:
            self._settled = True
            assert self._before is not None
            usual, usual_s = self._before
            if seconds < usual_s:
                return list(ready)
            self.k = 0
            return usual
        if step >= TRY_AT:
            self._before = list(ready), seconds
            costs = layer_costs(ready, sums)
            result = tune_first_k(
                lambda k: layer_step_time(reverse_first_k(self.layers, k), costs, "prioritised"), self.most, gain=GAIN
            )
            self.k = result.k
            self._settled = not result.k
            return complete_at(costs, result.k) if result.k else list(ready)
        return list(ready)


def layer_costs(ready: Sequence[float], sums: Sequence[float]) -> CostTable:
    """Return a layer's costs from when its usual backward was complete: the forward, the input gradient and the weight
    gradient of a layer of matrix products take the same time each, about."""
    after = [*ready[1:], 0.0]
    each = tuple(max(1e-9, (at - before) / 2) for at, before in zip(ready, after, strict=True))
    zeros = (0.0,) * len(each)
    return CostTable(
        forward=each, input_grad=each, weight_grad=each, recompute=each, all_reduce=tuple(sums), update=zeros
    )


def complete_at(costs: CostTable, k: int) -> list[float]:
    """Return when each layer's gradient is complete with the first ``k`` postponed, from the backward's begin."""
    now = 0.0
    result = [0.0] * costs.stages
    for layer in reversed(range(costs.stages)):
        if layer >= k:
            now += costs.weight_grad[layer]
            result[layer] = now
        now += costs.input_grad[layer]
    for layer in range(k):
        now += costs.weight_grad[layer]
        result[layer] = now
    return result


# Pure data parallelism layer by layer, over a link that serves one sum at a time: four ways to synchronise.
#
# ``schedule.walk`` issues collectives in the device's order, first come, first served. Here the link may also have a
# priority queue, as BytePS and ByteScheduler have: what the next forward needs first goes first, at any time.


LayerSync = Literal["lazy", "wait-free", "prioritised"]
"""When a layer's sum may start, and which goes first. ``lazy``: after the backward, in the order of their AR tasks;
``wait-free``: at its AR, first come, first served; ``prioritised``: at its AR, the layer nearest to the input first.
Reverse first-k is an order of tasks (``families.reverse_first_k``) under ``prioritised``."""
_WARM, _STEPS = 8, 24


class _SumLink:
    """Sums that wait for the link or are on it; it works as far as it is asked to."""

    def __init__(self, durations: tuple[float, ...], priority: bool) -> None:
        self.durations, self.priority = durations, priority
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
        """Send the next sum; of a prioritised one, as much as there is time for."""
        layer = min(self.left) if self.priority else next(iter(self.left))
        most = self.left[layer]
        if self.priority:
            most = min(most, max(0.0, until - self.now))
        self.now += most
        self.left[layer] -= most
        if self.left[layer] <= 1e-12 * self.durations[layer]:
            del self.left[layer]
            self.done[layer] = self.now


def layer_step_time(schedule: Schedule, costs: CostTable, sync: LayerSync) -> float:
    """Return the steady time per step of a data-parallel copy whose stages are layers: the mean of 24 after 8.

    A layer's forward waits for its own sum of the step before, and for nothing else of it: there is no barrier at the
    optimizer. Copies are alike, so one stands for all.

    Args:
        schedule: of one device, with an AR per layer right where its gradient is complete.
        costs: per layer, with ``all_reduce``.
        sync: how sums are ordered; a prioritised one can be interrupted at any time.

    Raises:
        ScheduleError: several devices, or an unknown ``sync``.

    Source: Oh et al. 2022 (OOO backprop), section 5.1; Peng et al. 2019 (ByteScheduler).
    """
    if schedule.devices != 1:
        raise ScheduleError("schedule", f"{schedule.devices} devices", "give the step of one data-parallel copy")
    if sync not in get_args(LayerSync):
        raise ScheduleError("sync", f'"{sync}" is unknown', nearest(str(sync), get_args(LayerSync)))
    tasks = list(schedule.orders[0])
    durations = costs.durations(schedule, tasks)
    link = _SumLink(costs.all_reduce, sync == "prioritised")
    last = max((n for n, t in enumerate(tasks) if t.kind != "AR"), default=0)
    late = [t.stage for t in tasks if t.kind == "AR"] if sync == "lazy" else []
    summed: set[int] = set()
    now, ends = 0.0, []
    for _ in range(_WARM + _STEPS):
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
    return (ends[-1] - ends[_WARM - 1]) / _STEPS
