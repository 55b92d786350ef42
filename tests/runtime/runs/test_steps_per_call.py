"""Several steps in one call of the workers give what one step a call gives, and no call goes beyond what is due."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from raypipe.runtime import calls as driver_calls
from raypipe.runtime.group.worker_group import WorkerGroup
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
    found: list[tuple[Done, list[int]]] = []
    for call_s in (0.0, 1e9):
        monkeypatch.setattr(driver_calls, "CALL_S", call_s)
        calls: list[int] = []
        with monkeypatch.context() as patch:
            found.append((drive(job, counted(stage_pool, calls, patch), tmp_path / str(call_s)), calls))
    (one, ones), (many, calls) = found
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
