"""A directory whose run left nothing can be used again; one with anything in it, or a run at work, cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.errors import SpecError
from raypipe.observe.run_dir import check_own, hold, mend_logs, place, put_aside, set_aside, stillborn
from raypipe.observe.run_log import RunLog, read_rows


def begun(directory: Path) -> Path:
    """As a run leaves it that fails before its first step."""
    log = RunLog(directory)
    log.event("run", resume=False)
    log.event("failed", message="no memory")
    return directory


def test_a_run_that_made_no_step_is_stillborn(tmp_path: Path) -> None:
    assert not stillborn(tmp_path)  # no run at all
    assert not stillborn(tmp_path / "nowhere")
    assert stillborn(begun(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    assert stillborn(tmp_path)


@pytest.mark.parametrize("left", ["row", "checkpoint", "part of a checkpoint"])
def test_one_that_left_anything_is_not(tmp_path: Path, left: str) -> None:
    begun(tmp_path)
    if left == "row":
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    else:
        step = tmp_path / "checkpoints" / "step-00000010"
        step.mkdir(parents=True)
        (step / ("manifest.json" if left == "checkpoint" else "rank-00000.safetensors")).write_text("{}")
    assert not stillborn(tmp_path)


def test_events_are_put_aside_and_none_is_lost(tmp_path: Path) -> None:
    before = (begun(tmp_path) / "events.jsonl").read_text()
    put_aside(tmp_path)
    again = (begun(tmp_path) / "events.jsonl").read_text()
    put_aside(tmp_path)
    assert (tmp_path / "events-1.jsonl").read_text() == before
    assert (tmp_path / "events-2.jsonl").read_text() == again
    assert not (tmp_path / "events.jsonl").exists()


HOLDER = """
import sys, time
from pathlib import Path
from raypipe.observe.run_dir import hold
kept = hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_two_runs_never_write_to_one_directory(tmp_path: Path) -> None:
    """And a run that is killed leaves its directory free."""
    other = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(SpecError, match="is running in it"):
            hold(tmp_path)
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.communicate()
    hold(tmp_path).close()


# Whose directory it is.


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "is empty"),
        (" ", "is empty"),
        ("s3://bucket/x", "is a URL, and a run directory is a path on a file system that every node sees"),
        (Path("s3://bucket/x"), "is a URL"),
        ("file:///tmp/x", "is a URL"),
        ("/", "is the root of the file system"),
        ("/tmp/..", "is the root of the file system"),
        ("~", "is your home directory"),
        ("a\0b", "NUL"),
    ],
)
def test_names_that_are_no_place_for_a_run(name: str | Path, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        place(name)
    assert caught.value.where == "--run-dir"
    assert caught.value.fix


def test_a_link_to_the_home_directory_is_that_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "link").symlink_to(home)
    with pytest.raises(SpecError, match="home directory"):
        place(tmp_path / "link")
    assert place("~/runs/x") == home / "runs" / "x"


def test_foreign_files_are_named_and_left_alone(tmp_path: Path) -> None:
    for name in ("plan.json", "metrics.jsonl", "job.json", "events.jsonl", "notes.txt"):
        (tmp_path / name).write_text('{"mine": 1}\n')
    (tmp_path / "checkpoints").mkdir()
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(SpecError, match=r"holds files but no run: checkpoints, events\.jsonl, job\.json and 3 more"):
        check_own(tmp_path)
    assert before == {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_a_runs_directory_an_empty_one_and_none_are_its_own(tmp_path: Path) -> None:
    check_own(tmp_path)
    check_own(tmp_path / "nowhere")
    begun(tmp_path)
    check_own(tmp_path)
    locked = tmp_path / "locked"
    locked.mkdir()
    hold(locked).close()
    (locked / "data").mkdir()
    check_own(locked)


# Damaged logs.


def test_damaged_lines_are_left_out_said_once_and_kept_beside(tmp_path: Path) -> None:
    metrics = (
        b'{"step": 1, "loss": 2.0}\n\xff\x00garbage\n[1]\n{"loss": 1}\n{"step": 2, "val_loss": null}\n{"step": 3}\n'
    )
    (tmp_path / "metrics.jsonl").write_bytes(metrics)
    (tmp_path / "events.jsonl").write_text('{"event": "run"}\n{"event": "checkpoint", "st')
    said: list[str] = []
    mend_logs(tmp_path, said.append)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 3]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == metrics
    assert (tmp_path / "events.jsonl").read_text() == '{"event": "run"}\n'
    assert not (tmp_path / "events.jsonl.damaged").exists()  # a line that a crash cut short is nothing to keep
    assert "4 lines, the first 2, are damaged and removed" in said[0]
    assert "line 2 is damaged and removed" in said[1]
    mend_logs(tmp_path, pytest.fail)


def test_what_is_set_aside_replaces_nothing(tmp_path: Path) -> None:
    for content in ("a", "b", "c"):
        (tmp_path / "plan.json").write_text(content)
        set_aside(tmp_path / "plan.json")
    result = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert result == {"plan.json.damaged": "a", "plan.json.damaged-2": "b", "plan.json.damaged-3": "c"}
