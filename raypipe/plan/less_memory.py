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

    First all activations are recomputed, then micro-batches get smaller. Cut, stages and replicas stay, so that the
    run's devices and its checkpoints serve. There is no prediction for the plan: it was made from what happened, which
    the plan before was predicted to fit.

    Args:
        job: the job.
        plan: what ran out of memory.
        whole_minibatches: whether the loss depends on the size of micro-batches (batch norm), so that it must stay.
    """
    for change, words in _changes(plan, whole_minibatches):
        parallel = plan.parallel.model_copy(update=change)
        found = plan.model_copy(update={"parallel": parallel, "predicted_step_s": None, "made_for": None})
        try:
            JobSpec.model_validate({**job.model_dump(), "parallel": parallel.model_dump()})
            build_schedule(found, job.train.batch)
        except (RaypipeError, ValueError):
            continue
        return found, words
    return None


def _changes(plan: Plan, whole_minibatches: bool) -> Iterator[tuple[dict[str, Any], str]]:
    parallel = plan.parallel
    if parallel.recompute != "full" or parallel.keep is not None:
        keys = {"recompute": "full", "keep": None, "alphas": None, "memory_cap_mb": None}
        yield keys, f"recompute: full instead of {_said(parallel.recompute)}"
    if not whole_minibatches and plan.order is None:  # an order of its own is for so many micro-batches
        for size in reversed(divisors(parallel.microbatch)[:-1]):
            yield {"microbatch": size}, f"micro-batches of {size} instead of {parallel.microbatch}"


def _said(recompute: object) -> str:
    return recompute if isinstance(recompute, str) else "some layers"
