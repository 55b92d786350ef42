"""Checkpoints that are written beside training are, bit for bit, those for which training waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from raypipe.checkpoint import open_checkpoint
from raypipe.observe.run_log import EVENTS, read_rows
from tests.exhaustive import exhaustive
from tests.runtime.runs.small_runs import drive, small_job


def tensors(path: Path) -> dict[str, torch.Tensor]:
    open_checkpoint(path)
    return {key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()}


@pytest.mark.runs
@pytest.mark.parametrize(
    ("parallel", "train"),
    [
        ({"schedule": "zb-v", "stages": 2, "replicas": 2, "microbatch": 1}, {"clip": 100.0}),
        ({"schedule": "1f1b", "stages": 2, "replicas": 2, "microbatch": 2, "shard": "zero3"}, {}),
        *exhaustive(
            ({"schedule": "1f1b", "stages": 2, "tensor": 2}, {"clip": 0.5}),
            ({"schedule": "pipedream-2bw", "stages": 2}, {}),
        ),
    ],
    ids=["optimistic", "sharded", "tensor", "2bw"],
)
def test_the_step_that_goes_on_changes_no_checkpoint(
    parallel: dict[str, Any], train: dict[str, Any], text_folder: Path, stage_pool, tmp_path: Path
) -> None:
    runs = {}
    for way in (True, False):
        job = small_job(text_folder, parallel, async_save=way, checkpoint_every=1, **train)
        runs[way] = drive(job, stage_pool, tmp_path / str(way))
    assert runs[True].losses == runs[False].losses
    assert list(runs[True].checkpoints) == list(runs[False].checkpoints) == [1, 2, 3, 4]
    for step, path in runs[True].checkpoints.items():
        found, expected = tensors(path), tensors(runs[False].checkpoints[step])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found), step
    events = read_rows(tmp_path / "True" / EVENTS)
    kinds = [(e["event"], e["step"]) for e in events if e["event"].startswith("checkpoint")]
    assert [k for k in kinds if k[0] == "checkpoint_begun"] == [("checkpoint_begun", n) for n in (1, 2, 3, 4)]
    assert all(kinds.index(("checkpoint_begun", n)) < kinds.index(("checkpoint", n)) for n in (1, 2, 3, 4))
