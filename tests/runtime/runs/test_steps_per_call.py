"""Several steps in one call of the workers give what one step a call gives, and no call goes beyond what is due."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from raypipe.runtime import calls as driver_calls
from raypipe.runtime.group.worker_group import WorkerGroup
from tests.exhaustive import exhaustive
from tests.runtime.runs.small_runs import Done, drive, small_job

pytestmark = pytest.mark.runs
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
