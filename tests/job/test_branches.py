"""What a job that is cut as a graph of branches cannot ask for: one clear error each."""

from __future__ import annotations

from typing import Any

import pytest

from raypipe.errors import SpecError
from raypipe.job.spec import job_from

MODEL = {"import": "jobs.inception_v3:build"}
BRANCHES = {"schedule": "auto", "placement": "branches", "stages": 2, "microbatch": 4}


def job(model: dict[str, Any], **parallel: Any) -> None:
    job_from(
        {
            "name": "b", "model": model,
            "data": {"path": "stdlib"} if "type" in model else {"type": "arrays", "path": "pairs.npz"},
            "train": {"steps": 1, "batch": 8}, "parallel": {**BRANCHES, **parallel},
        }
    )  # fmt: skip


def test_what_branches_have() -> None:
    job(MODEL)
    job(MODEL, replicas=2, recompute="full")


@pytest.mark.parametrize(
    ("given", "where", "says"),
    [
        ({"schedule": "1f1b"}, "parallel.placement", "1f1b has a fixed placement"),
        ({"chunks": 2}, "parallel.chunks", "as many stages as its branches need"),
        ({"memory_limit": 3}, "parallel.memory_limit", "differ in size"),
        ({"replan": True}, "parallel.replan", "has no use for it"),
        ({"tensor": 2}, "parallel.tensor", "use tensor: 1"),
        ({"recompute": ["0"]}, "parallel.recompute", "whole stages or none"),
        ({"shard": "zero1", "replicas": 2}, "parallel.shard", "use shard: none"),
    ],
)
def test_what_they_have_not(given: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        job(MODEL, **given)
    assert where in str(caught.value)


def test_the_planner_chooses_among_chains() -> None:
    with pytest.raises(SpecError, match=r"placement: cannot be given .*\n.*give schedule, stages and microbatch"):
        job(MODEL, recompute="layers")


def test_the_built_in_gpt_has_none() -> None:
    with pytest.raises(SpecError, match="a chain of blocks without branches"):
        job({"type": "gpt", "layers": 2, "hidden": 16, "heads": 2, "sequence": 8})
