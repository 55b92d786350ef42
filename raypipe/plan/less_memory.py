"""A plan that needs less memory than one that ran out of it, for the same devices and with the same results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raypipe.errors import RaypipeError
from raypipe.job.spec import JobSpec
from raypipe.plan.candidate import divisors
from raypipe.plan.plan import Plan, build_schedule


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
    for before, change, words in _changes(plan, whole_minibatches):
        parallel = before.parallel.model_copy(update=change)
        found = before.model_copy(update={"parallel": parallel, "predicted_step_s": None, "made_for": None})
        try:
            JobSpec.model_validate({**job.model_dump(), "parallel": parallel.model_dump()})
            build_schedule(found, job.train.batch)
        except (RaypipeError, ValueError):
            continue
        return found, words
    return None


def _changes(plan: Plan, whole_minibatches: bool) -> Iterator[tuple[Plan, dict[str, Any], str]]:
    """Yield a plan, keys of ``parallel`` to change in it, and words for all that changes."""
    parallel = plan.parallel
    if parallel.gather == "order":
        plan = plan.model_copy(update={"order": None})
        yield plan, {"gather": "microbatch"}, "gathers every micro-batch instead of the plan's own"
        plan = plan.model_copy(update={"parallel": parallel.model_copy(update={"gather": "microbatch"})})
    if parallel.recompute != "full" or parallel.keep is not None:
        keys: dict[str, Any] = {"recompute": "full", "keep": None, "alphas": None}
        keys["memory_cap_mb"] = parallel.memory_cap_mb if parallel.postpones else None
        yield plan, keys, f"recompute: full instead of {_said(parallel.recompute)}"
    if not whole_minibatches and plan.order is None:  # an order of its own is for so many micro-batches
        for size in reversed(divisors(parallel.microbatch)[:-1]):
            yield plan, {"microbatch": size}, f"micro-batches of {size} instead of {parallel.microbatch}"


def _said(recompute: object) -> str:
    return recompute if isinstance(recompute, str) else "some layers"
