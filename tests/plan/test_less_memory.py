"""What a run does about memory that was not enough: recomputation first, then smaller micro-batches, then nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.plan.plan import Plan, less_memory
from raypipe.train import make_plan
from tests.runtime.runs.small_runs import small_job


def changes(plan: Plan, job: Any, **keys: Any) -> list[str]:
    """One after another, until nothing is left."""
    result = []
    while (smaller := less_memory(job, plan, **keys)) is not None:
        plan, words = smaller
        assert (plan.predicted_step_s, plan.made_for) == (None, None)
        result.append(words)
    return result


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"schedule": "1f1b", "stages": 2, "microbatch": 4}, ["full", "2 instead of 4", "1 instead of 2"]),
        ({"schedule": "1f1b", "stages": 2, "recompute": "full"}, ["1 instead of 2"]),
        ({"schedule": "1f1b", "stages": 2, "recompute": [0], "microbatch": 1}, ["full instead of some layers"]),
        ({"schedule": "chimera", "stages": 2, "microbatch": 2, "replicas": 2}, ["full", "1 instead of 2"]),
    ],
)
def test_what_is_given_up_one_after_another(parallel: dict[str, Any], expected: list[str], text_folder: Path) -> None:
    job = small_job(text_folder, parallel)
    result = changes(make_plan(job), job)
    assert len(result) == len(expected)
    assert all(words in line for words, line in zip(expected, result, strict=True))


def test_batch_norm_and_a_searched_order_keep_their_micro_batches(text_folder: Path) -> None:
    job = small_job(text_folder, {"schedule": "1f1b", "stages": 2})
    plan = make_plan(job)
    assert changes(plan, job, whole_minibatches=True) == ["recompute: full instead of none"]
    job = small_job(text_folder, {"schedule": "auto", "stages": 2})
    assert changes(make_plan(job), job) == ["recompute: full instead of none"]
