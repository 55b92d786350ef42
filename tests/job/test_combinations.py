"""What a divided head, divided sequences and branches cannot be combined with: each key by name, before the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.errors import RaypipeError, SpecError
from raypipe.train import make_plan, prepare_run
from tests.job.test_slices import job as sliced_job
from tests.job_files import minimal_job
from tests.runtime.runs.small_runs import small_job

SPLIT: dict[str, Any] = {"schedule": "1f1b", "stages": 2, "vocabulary": "split"}


@pytest.mark.parametrize(
    ("parallel", "train", "says"),
    [
        ({"schedule": "gpipe"}, {}, "parallel.vocabulary: gpipe has no use for vocabulary = split"),
        ({"schedule": "auto"}, {}, "parallel.vocabulary: "),
        ({"stages": 1}, {}, "parallel.vocabulary: one device has nothing to divide a head with"),
        ({"slices": 2}, {}, "parallel.vocabulary: split has no order for 2 slices"),
        ({"tensor": 2}, {}, "parallel.tensor: .*split\n  fix: use tensor: 1"),
        ({"replan": True}, {}, "parallel.replan: .*split\n  fix: leave it out"),
        ({"replicas": 2, "sync": "prioritised"}, {"clip": None}, "parallel.sync: prioritised .*split"),
        ({"recompute": "stage-aware", "alphas": 0.5}, {}, "parallel.recompute: stage-aware is for a chain"),
        ({}, {"compile": "inductor"}, "train.compile: inductor runs whole logits"),
        ({}, {"optimizer": "adafactor"}, "parallel.vocabulary: split divides parameters, of which adafactor"),
    ],
)  # fmt: skip
def test_each_is_refused(parallel: dict[str, Any], train: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=says):
        small_job(tmp_path, {**SPLIT, **parallel}, **train)


def test_stages_are_counted_without_those_of_the_head(text_folder: Path) -> None:
    """Four layers are four stages, the shares and the loss five more; a fifth device has no layer left."""
    plan = make_plan(small_job(text_folder, {**SPLIT, "stages": 4}))
    assert plan.cut == ((0, 1), (2,), (3,), (4, 5), (6,), (7,), (8,), (9,), (10,))
    with pytest.raises(SpecError, match="5 stages for a model of 4 layers"):
        small_job(text_folder, {**SPLIT, "stages": 5})


# What cannot be combined with sequences that copies divide is refused before anything starts.


@pytest.mark.parametrize(
    ("parallel", "train", "says"),
    [
        ({"replicas": 3}, {}, "3 replicas are not a multiple of 2\n  fix: use context: 1, or replicas: 4"),
        ({"slices": 2}, {}, "cannot be combined with slices: 2"),
        ({"sync": "prioritised"}, {"clip": None}, "cannot be combined with context: 2"),
        ({"update": "optimistic"}, {}, "cannot be combined with context: 2"),
        ({"tensor": 2, "sub_pipelined": True}, {}, "cannot be combined with context: 2"),
        ({}, {"compile": "inductor"}, "run whole sequences"),
        ({}, {"batch": 3}, "3 is not divisible by microbatch = 2 times replicas = 2 / context = 2"),
    ],
)
def test_keys_that_context_excludes(parallel, train, says, tmp_path) -> None:
    with pytest.raises(RaypipeError, match=says):
        sliced_job(tmp_path, train=train, **{"slices": 1, "replicas": 2, "context": 2, **parallel})


@pytest.mark.parametrize(
    ("model", "parallel", "train", "says"),
    [
        ({}, {"replicas": 4, "context": 4}, {}, "into 8 equal .*\n.*use context: 3, or sequences of 8 or 16"),
        ({"hf": "bert", "config": {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2,
          "intermediate_size": 16, "vocab_size": 257}, "sequence": 12}, {}, {}, "parallel.context: .*use context: 1"),
        ({}, {}, {"metrics": "tests.job.test_slices:figures"}, "want them whole"),
    ],
)  # fmt: skip
def test_jobs_whose_sequences_cannot_be_divided(model, parallel, train, says, text_folder, tmp_path) -> None:
    divided = {"slices": 1, "replicas": 2, "context": 2, **parallel}
    with pytest.raises(RaypipeError, match=f"(?s){says}"):
        prepare_run(sliced_job(text_folder, model or None, train, **divided), tmp_path / "run", resume=False)


# What a job that is cut as a graph of branches cannot ask for: one clear error each.


MODEL = {"import": "jobs.inception_v3:build"}
BRANCHES = {"schedule": "auto", "placement": "branches", "stages": 2, "microbatch": 4}


def branched(model: dict[str, Any], **parallel: Any) -> None:
    minimal_job(
        model,
        {"path": "stdlib"} if "type" in model else {"type": "arrays", "path": "pairs.npz"},
        {**BRANCHES, **parallel},
        batch=8,
    )


def test_what_branches_have() -> None:
    branched(MODEL)
    branched(MODEL, replicas=2, recompute="full")


@pytest.mark.parametrize(
    ("given", "where", "says"),
    [
        ({"schedule": "1f1b"}, "parallel.placement", "1f1b has a fixed placement"),
        ({"chunks": 2}, "parallel.chunks", "as many stages as its branches need"),
        ({"memory_limit": 3}, "parallel.memory_limit", "differ in size"),
        ({"replan": True}, "parallel.replan", "has no use for it"),
        ({"tensor": 2}, "parallel.tensor", "use tensor: 1"),
        ({"recompute": ["0"]}, "parallel.recompute", "whole stages or none"),
    ],
)
def test_what_they_have_not(given: dict[str, Any], where: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        branched(MODEL, **given)
    assert where in str(caught.value)


def test_the_planner_chooses_among_chains() -> None:
    with pytest.raises(SpecError, match=r"placement: cannot be given .*\n.*give schedule, stages and microbatch"):
        branched(MODEL, recompute="layers")


def test_the_built_in_gpt_has_none() -> None:
    with pytest.raises(SpecError, match="a chain of blocks without branches"):
        branched({"type": "gpt", "layers": 2, "hidden": 16, "heads": 2, "sequence": 8})
