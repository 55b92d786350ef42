"""Results that another way to run must not change: several steps a call, late results, checkpoints beside training."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from raypipe.checkpoint import open_checkpoint
from raypipe.observe.run_log import EVENTS, read_rows
from raypipe.runtime import calls as driver_calls
from raypipe.runtime.worker.worker_group import WorkerGroup
from tests.exhaustive import exhaustive
from tests.runtime.runs.small_runs import Done, drive, small_job

TRAIN: dict[str, Any] = {"steps": 19, "clip": 0.5, "eval_every": 9, "checkpoint_every": 7}


def counted(pool: Any, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pool whose workers note how many steps each call holds."""
    whole = WorkerGroup.call

    def call(self: WorkerGroup, method: str, *args: Any) -> list[Any]:
        if method == "run_steps":
            calls.append(len(args[1]))
        return whole(self, method, *args)

    monkeypatch.setattr(WorkerGroup, "call", call)
    return pool


@pytest.mark.runs
@pytest.mark.parametrize(
    "parallel",
    [
        {"schedule": "1f1b", "stages": 2},
        *exhaustive({"schedule": "zb-h1", "stages": 2}, {"schedule": "pipedream-2bw", "stages": 2}),
    ],
    ids=str,
)
def test_results_are_the_same(
    parallel: dict[str, Any], stage_pool: Any, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = TRAIN if parallel["schedule"] != "pipedream-2bw" else {**TRAIN, "clip": None}
    job = small_job(text_folder, parallel, **train)
    result: list[tuple[Done, list[int]]] = []
    for call_s in (0.0, 1e9):
        monkeypatch.setattr(driver_calls, "CALL_S", call_s)
        calls: list[int] = []
        with monkeypatch.context() as patch:
            result.append((drive(job, counted(stage_pool, calls, patch), tmp_path / str(call_s)), calls))
    (one, ones), (many, calls) = result
    assert ones == [1] * 19
    # Five before three steps have been measured; then up to what is due after 7, 9, 14, 18 and 19.
    assert list(accumulate(calls)) == [1, 2, 3, 4, 5, 7, 9, 14, 18, 19]
    assert (many.losses, many.val_losses) == (one.losses, one.val_losses)
    assert [row["grad_norm"] for row in many.rows] == [row["grad_norm"] for row in one.rows]
    assert [row["step"] for row in many.rows] == list(range(1, 20))
    assert many.checkpoints.keys() == one.checkpoints.keys()


# Where devices run behind their hosts, a step's result is asked for when the next step has been queued.


def with_late_results(workers: WorkerGroup) -> WorkerGroup:
    """The same workers, which the run takes for GPUs: ``run_step`` returns nothing, ``result`` does."""
    locations = [replace(at, peer=replace(at.peer, device=f"gpu {at.peer.rank}")) for at in workers.locations]
    return replace(workers, locations=locations)


@pytest.mark.runs
@pytest.mark.parametrize("parallel", [*exhaustive({"stages": 1}), {"stages": 1, "replicas": 2}], ids=str)
def test_late_results_are_the_same(parallel, stage_pool, text_folder, tmp_path) -> None:
    """Losses, norms, validations and checkpoints, with steps between them that are still unread."""
    # No messages: the channels of what is taken for a GPU would need one.
    job = small_job(text_folder, parallel, steps=7, batch=8, clip=0.5, eval_every=3, checkpoint_every=2)
    at_once = drive(job, stage_pool, tmp_path / "at-once")
    late = drive(job, lambda n: with_late_results(stage_pool(n)), tmp_path / "late")
    assert late.losses == at_once.losses
    assert late.val_losses == at_once.val_losses
    assert [row.get("grad_norm") for row in late.rows] == [row.get("grad_norm") for row in at_once.rows]
    assert late.checkpoints.keys() == at_once.checkpoints.keys()


# Checkpoints that are written beside training are, bit for bit, those for which training waits.


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
        result, expected = tensors(path), tensors(runs[False].checkpoints[step])
        assert result.keys() == expected.keys()
        assert all(torch.equal(result[key], expected[key]) for key in result), step
    events = read_rows(tmp_path / "True" / EVENTS)
    kinds = [(e["event"], e["step"]) for e in events if e["event"].startswith("checkpoint")]
    assert [k for k in kinds if k[0] == "checkpoint_begun"] == [("checkpoint_begun", n) for n in (1, 2, 3, 4)]
    assert all(kinds.index(("checkpoint_begun", n)) < kinds.index(("checkpoint", n)) for n in (1, 2, 3, 4))
