"""How long a step of one order takes with everything besides its tasks: all-reduces, the global norm, updates.

One data-parallel copy stands for all: they do the same at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from raypipe.plan.predict.orders import Order
from raypipe.schedule.costs import CostTable
from raypipe.schedule.lowering.norm_policy import NormPolicy, RequestedNormPolicy, resolve
from raypipe.schedule.passes.sync import Sync, gradient_sync_end, held
from raypipe.schedule.verify import check_ran
from raypipe.schedule.walk import walk
from raypipe.simulate.period import period


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOverheads:
    """Times of a step besides its compute tasks."""

    copies: int = 1
    """Data-parallel copies, W."""
    norm: RequestedNormPolicy | Literal["none"] = "none"
    """What updates do about the global gradient norm; ``auto`` waits where waiting costs nothing."""
    norm_s: float = 0.0
    """Time of the sum over all devices that makes the norm."""

    def waits(self, order: Order) -> bool:
        """A barrier lies between two steps of this order."""
        return resolve(self.norm, lambda: order.gains_ahead) == "wait"


class StepTime(NamedTuple):
    """Seconds of a step and of parts of it."""

    step: float
    """Steady time per step."""
    compute: float
    """The same without gathers, gradient sums, barrier and updates."""
    busy: float
    """Mean time that a device computes."""


def step_time(order: Order, costs: CostTable, sync: Sync, overheads: StepOverheads, parts: bool = True) -> StepTime:
    """Time a step.

    Where updates wait for the norm: every device's compute and gradient sums, the norm, then the longest update. Where
    they do not, the period: a device goes on with the next step as soon as its own order is done. Asynchronous
    schedules: their period, and what they do between two steps (sum gradients, update) on top, since nothing overlaps
    with that.

    Args:
        order: compute tasks of one data-parallel copy.
        costs: seconds of each task; ``all_reduce`` over all holders of a stage, other copies included.
        sync: where gradient sums are placed.
        overheads: what the step has besides its compute tasks.
        parts: also compute what the step takes without its overheads where that needs a second run.

    Raises:
        ScheduleError: the order cannot run.
    """
    bare = order.schedule
    shared = bare.replicas * overheads.copies > 1
    busy = order.work(costs) / bare.devices
    if bare.versions != "flush":
        all_reduces = [sum(costs.all_reduce[s] for s, _ in pairs) if shared else 0.0 for pairs in held(bare)]
        updates = [sum(costs.update[s] for s, _ in pairs) for pairs in held(bare)]
        each = bare.microbatches if bare.versions == "stash" else 1
        compute = period(bare, costs, order.graph)
        return StepTime(compute + max(each * u + a for u, a in zip(updates, all_reduces, strict=True)), compute, busy)
    if not overheads.waits(order):
        whole = order.whole(sync if shared else None, overheads.copies)
        norm: NormPolicy = "none" if overheads.norm == "none" else "optimistic"
        step = period(whole.schedule, costs, whole.graph, norm)
        nothing = (0.0,) * costs.stages
        alone = replace(costs, all_reduce=nothing, update=nothing, gather=nothing, reduce_scatter=nothing)
        return StepTime(step, period(whole.schedule, alone, whole.graph, norm) if parts else step, busy)
    divided = bare.sharding is not None
    alone = replace(costs, gather=(), reduce_scatter=()) if divided else costs
    done = walk(order.graph, alone.durations(bare, order.graph.tasks), costs.comm)
    check_ran(order.graph, done)
    compute = max(done.end)
    if divided:
        whole = order.whole(sync if shared else None, overheads.copies)
        summed = _end(whole, costs)
    else:
        summed = _gradient_sync_end(order, done.end, costs, sync) if shared else compute
    update = max(sum(costs.update[s] for s, _ in pairs) for pairs in held(bare))
    return StepTime(max(compute, summed) + overheads.norm_s + update, compute, busy)


def _gradient_sync_end(order: Order, end: list[float], costs: CostTable, sync: Sync) -> float:
    """When the last all-reduce is done, from the ends of the compute tasks."""
    if sync == "eager-opt":  # where devices idle decides: ask the pass
        return _end(order.whole(sync), costs)
    return gradient_sync_end(order.graph, order.last_gradients, order.sync_order, end, costs.all_reduce, sync)


def _end(order: Order, costs: CostTable) -> float:
    """When all is done but the updates.

    Raises:
        ScheduleError: the order cannot run, for instance because a gather and a gradient sum wait for each other.
    """
    table = replace(costs, update=(0.0,) * costs.stages)
    done = walk(order.graph, table.durations(order.schedule, order.graph.tasks), costs.comm)
    check_ran(order.graph, done)
    return max(done.end)
