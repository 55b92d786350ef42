"""A job's schedule, and the memory that it may fill."""

from __future__ import annotations

from typing import Any

import pytest

from raypipe.errors import SpecError
from raypipe.job.load import job_from
from raypipe.plan.plan import Plan, build_schedule
from raypipe.schedule.memory import peak_activations


def job_with(**parallel: Any):
    return job_from(
        {
            "name": "limited",
            "model": {"type": "gpt", "layers": 6, "hidden": 16, "heads": 2, "sequence": 16, "vocabulary": 256},
            "data": {"type": "bytes", "path": "stdlib"}, "train": {"steps": 1, "batch": 16},
            "parallel": {"schedule": "1f1b", "stages": 4, "microbatch": 2, **parallel},
        }
    )  # fmt: skip


def test_what_is_recomputed_does_not_count_until_then() -> None:
    """1F1B on four devices holds four activations; recomputed, one at a time."""
    with pytest.raises(SpecError, match="holds 2 activations, the limit is 1"):
        job_with(memory_limit=1)
    job = job_with(memory_limit=1, recompute="full")
    cut = ((0, 1), (2, 3), (4, 5), (6, 7))
    assert peak_activations(build_schedule(Plan(parallel=job.parallel, cut=cut), 16)) == (1, 1, 1, 1)
    with pytest.raises(SpecError, match=r"the limit is 0\.5"):
        job_with(memory_limit=0.5, recompute="full")
    with pytest.raises(SpecError, match="holds 2 activations, the limit is 1"):
        job_with(memory_limit=1, recompute="full", keep=[1.0, 1.0, 1.0, 1.0])
    # Of single layers, a stage keeps the others from the forward on.
    with pytest.raises(SpecError, match="holds 2 activations, the limit is 1"):
        job_with(memory_limit=1, recompute=[0])


def test_a_family_that_orders_by_the_limit_still_does() -> None:
    parallel = job_with(schedule="zb-h1", memory_limit=2).parallel
    plan = Plan(parallel=parallel, cut=((0, 1), (2, 3), (4, 5), (6, 7)))
    assert max(peak_activations(build_schedule(plan, 16))) == 2
