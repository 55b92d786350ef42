"""What a head divided over devices cannot be combined with: each key by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.errors import SpecError
from raypipe.train import make_plan
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
        ({"replicas": 2, "context": 2}, {}, "parallel.context: .*split"),
        ({"replicas": 2, "shard": "zero1"}, {}, "parallel.shard: .*split"),
        ({"replan": True}, {}, "parallel.replan: .*split\n  fix: leave it out"),
        ({"replicas": 2, "sync": "prioritised"}, {"clip": None}, "parallel.sync: prioritised .*split"),
        ({"recompute": "stage-aware", "alphas": 0.5}, {}, "parallel.recompute: stage-aware is for a chain"),
        ({}, {"compile": "inductor"}, "train.compile: inductor runs whole logits"),
        ({}, {"optimizer": "muon"}, "parallel.vocabulary: split divides parameters, of which muon reads whole rows"),
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
