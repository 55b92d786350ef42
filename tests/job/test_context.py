"""What cannot be combined with sequences that copies divide is refused before anything starts."""

from __future__ import annotations

import pytest

from raypipe.errors import RaypipeError
from raypipe.train import prepare_run
from tests.job.test_slices import job


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
        job(tmp_path, train=train, **{"slices": 1, "replicas": 2, "context": 2, **parallel})


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
        prepare_run(job(text_folder, model or None, train, **divided), tmp_path / "run", resume=False)
