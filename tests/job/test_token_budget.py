"""How many rows a token budget makes, and which budgets are refused."""

from __future__ import annotations

from typing import Any

import pytest

from raypipe.errors import SpecError
from raypipe.job import JobSpec, job_from
from raypipe.job.train_spec import rows_needed


def job_of(train: dict[str, Any], parallel: object = None, **sections: dict[str, Any]) -> JobSpec:
    job: dict[str, Any] = {
        "name": "packed", "model": {"hf": "llama"}, "data": {"type": "arrays", "path": "rows.npz"},
        "train": {"steps": 4, **train}, "parallel": parallel or {"stages": 2},
    }  # fmt: skip
    return job_from({**job, **sections})


@pytest.mark.parametrize(
    ("train", "parallel", "rows", "row_tokens"),
    [
        ({"microbatch_tokens": 100}, {"stages": 2}, 19, 100),
        ({"microbatch_tokens": 100}, {"stages": 2, "replicas": 2}, 20, 100),
        ({"microbatch_tokens": 1000}, {"stages": 2}, 1, 1000),
        ({"microbatch_tokens": 100, "batch": 24}, {"stages": 2, "microbatch": 2}, 24, 100),
        ({}, {"stages": 2}, 8, 223),
        ({}, {"stages": 2, "replicas": 3}, 24, 80),
        ({"batch": 4}, {"stages": 2}, 4, 400),
        ({}, "auto", 32, 61),
        ({}, {"auto": True, "replicas": 3}, 33, 59),
        ({"microbatch_tokens": 100}, "auto", 19, 100),
        ({"microbatch_tokens": 100}, {"stages": 2, "replicas": 2, "context": 2}, 19, 100),
        ({}, {"stages": 2, "replicas": 4, "context": 2}, 16, 120),
    ],
)
def test_rows_and_their_tokens(train: dict[str, Any], parallel: object, rows: int, row_tokens: int) -> None:
    made = job_of({"tokens_per_step": 1000, **train}, parallel)
    assert (made.train.batch, made.train.microbatch_tokens) == (rows, row_tokens)
    assert rows_needed(1000, row_tokens) <= rows
    assert job_from(made.model_dump()).train == made.train


def test_rows_divide_among_the_copies_that_share_experts() -> None:
    train = {"tokens_per_step": 1000, "microbatch_tokens": 100}
    assert job_of(train, {"auto": True, "experts": 4}).train.batch == 20


@pytest.mark.parametrize(
    ("train", "sections", "where"),
    [
        ({"microbatch_tokens": 2000}, {}, "train.microbatch_tokens"),
        ({"microbatch_tokens": 100, "batch": 18}, {}, "train.batch"),
        ({"microbatch_tokens": 100, "batch": 21}, {"parallel": {"replicas": 2}}, "train.batch"),
        ({"metrics": "mine:metrics"}, {}, "train.metrics"),
        ({}, {"parallel": {"stages": 2, "slices": 2, "schedule": "1f1b"}}, "parallel.slices"),
        ({"microbatch_tokens": 100}, {"parallel": {"replicas": 8, "context": 8}}, "train.microbatch_tokens"),
        ({}, {"model": {"import": "mine:model"}}, "train.tokens_per_step"),
        ({}, {"data": {"type": "documents", "path": "folder"}, "model": {"hf": "llama", "sequence": 8}},
         "train.tokens_per_step"),
        ({"tokens_per_step": 0}, {}, "train"),
        ({"tokens_per_step": None}, {}, "train.batch"),
    ],
)  # fmt: skip
def test_what_is_refused(train: dict[str, Any], sections: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as caught:
        job_of({"tokens_per_step": 1000, **train}, **sections)
    assert where in caught.value.where
    assert caught.value.fix
