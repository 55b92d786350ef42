"""Asynchronous 1F1B: steps follow each other without a flush, on several versions of the weights."""

from __future__ import annotations

from dataclasses import replace

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.one_f_one_b import one_f_one_b
from raypipe.schedule.ir import Schedule
from raypipe.schedule.shape import Shape


def pipedream(shape: Shape, costs: CostTable) -> Schedule:
    """Run 1F1B with an update after every micro-batch; a backward uses the weights of its forward.

    The tasks are those of N micro-batches of 1F1B. ``schedule.unroll`` joins steps to the continuous order, in which
    devices idle only in the first fill and the last drain. Stage s keeps D - s versions of its weights.

    Source: Narayanan et al. 2019 (PipeDream), sections 3.2 and 3.3; Chimera section 2.
    """
    _check_full(shape, "each device keeps up to D in flight")
    return replace(one_f_one_b(shape, costs), name="pipedream", versions="stash")


def pipedream_2bw(shape: Shape, costs: CostTable) -> Schedule:
    """Run 1F1B without a flush, with an update per N >= D micro-batches: w(t+1) = w(t) - lr * grad(w(t-1)).

    Source: Narayanan et al. 2021 (PipeDream-2BW), arXiv:2006.09503, section 3.1; Chimera section 2.
    """
    _check_full(shape, "forwards would meet a third version of the weights")
    return replace(one_f_one_b(shape, costs), name="pipedream-2bw", versions="2bw")


def _check_full(shape: Shape, why: str) -> None:
    if shape.microbatches < shape.devices:
        raise ScheduleError(
            "microbatches",
            f"{shape.microbatches} micro-batches a step on {shape.devices} devices; {why}",
            f"use {shape.devices} or more",
        )
