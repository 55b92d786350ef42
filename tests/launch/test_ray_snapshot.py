"""Ray Train's note of checkpoints: one that Ray would refuse is set aside, and said; another one is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypipe.launch.run_directory import SNAPSHOT, check_snapshot

STEP = {"version": 0, "checkpoint_dir_name": "checkpoints/step-00000002", "metrics": {"step": 2}}
NOTE = {
    "ray_version": "2.60.0", "checkpoint_results": [STEP], "checkpoint_report_indices": [0],
    "latest_checkpoint_result": STEP, "pending_training_results": [], "pending_validation_specs": [],
    "current_report_index": 1, "validated_checkpoint_dir_names": [], "timed_out_validation_checkpoint_dir_names": [],
    "failed_validation_checkpoint_dir_names": [],
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / STEP["checkpoint_dir_name"]).mkdir(parents=True)
    (tmp_path / SNAPSHOT).write_text(json.dumps(NOTE))
    return tmp_path


def test_a_whole_one_stays(run: Path) -> None:
    check_snapshot(run, pytest.fail)
    assert json.loads((run / SNAPSHOT).read_text()) == NOTE
    (run / SNAPSHOT).unlink()
    check_snapshot(run, pytest.fail)  # none is none


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is damaged"),
        (b'{"ray_version": "2', "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (b"[]", "is damaged"),
        (json.dumps({**NOTE, "checkpoint_results": 3}).encode(), "is damaged"),
        (json.dumps({**NOTE, "checkpoint_report_indices": []}).encode(), "contradicts itself"),
    ],
)
def test_a_damaged_one_is_set_aside_and_said_once(run: Path, content: bytes, words: str) -> None:
    (run / SNAPSHOT).write_bytes(content)
    said: list[str] = []
    check_snapshot(run, said.append)
    check_snapshot(run, said.append)
    assert len(said) == 1
    assert words in said[0]
    assert (run / f"{SNAPSHOT}.damaged").read_bytes() == content
    assert not (run / SNAPSHOT).exists()


def test_one_of_checkpoints_that_are_gone(run: Path) -> None:
    (run / STEP["checkpoint_dir_name"]).rmdir()
    said: list[str] = []
    check_snapshot(run, said.append)
    assert "names checkpoints/step-00000002, which is gone" in said[0]
