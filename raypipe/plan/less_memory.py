"""A plan that needs less memory than one that ran out of it, for the same devices and with the same results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from raypipe.errors import RaypipeError
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.spec import JobSpec
from raypipe.plan.candidate import divisors
from raypipe.plan.plan import Plan, build_schedule
from raypipe.schedule import SCHEDULES
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import SHARDED


def less_memory(job: JobSpec, plan: Plan, whole_minibatches: bool = False) -> tuple[Plan, str] | None:
    """Return the plan that gives up least time for memory, and what changes; None if there is none.

    First all activations are recomputed, then micro-batches get smaller. Gathers of an order's own fill a device's
    memory, so they give way to one every micro-batch. Cut, stages and replicas stay, so that the
    run's devices and its checkpoints serve. There is no prediction for the plan: it was made from what happened, which
    the plan before was predicted to fit.

    Args:
        job: the job.
        plan: what ran out of memory.
        whole_minibatches: whether the loss depends on the size of micro-batches (batch norm), so that it must stay.
    """
    for parallel, order, words in _changes(plan, whole_minibatches):
        try:
            JobSpec.model_validate({**job.model_dump(), "parallel": parallel.model_dump()})
            result = Plan.of(parallel, plan.cut, job.train.batch, order, plan.frozen)
            build_schedule(result, job.train.batch)
        except (RaypipeError, ValueError):
            continue
        return result, words
    return None


def _changes(plan: Plan, whole_minibatches: bool) -> Iterator[tuple[ParallelSpec, Schedule | None, str]]:
    """Yield other ``parallel`` keys, the order that they are for (None: the named one), and words for what changes."""
    parallel, order = plan.parallel, plan.order()
    if parallel.gather == "order":
        order = replace(order.without(SHARDED), sharding=None)
        parallel = parallel.model_copy(update={"gather": "microbatch"})
        yield parallel, order, "gathers every micro-batch instead of the plan's own"
    if parallel.recompute != "full" or parallel.keep is not None:
        keys: dict[str, Any] = {"recompute": "full", "keep": None, "alphas": None}
        keys["memory_cap_mb"] = parallel.memory_cap_mb if parallel.postpones else None
        yield parallel.model_copy(update=keys), order, f"recompute: full instead of {_said(parallel.recompute)}"
    if not whole_minibatches and parallel.schedule in SCHEDULES:  # another order is for so many micro-batches
        for size in reversed(divisors(parallel.microbatch)[:-1]):
            changed = parallel.model_copy(update={"microbatch": size})
            yield changed, None, f"micro-batches of {size} instead of {parallel.microbatch}"


def _said(recompute: object) -> str:
    return recompute if isinstance(recompute, str) else "some layers"
