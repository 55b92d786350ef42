"""A directory whose run left nothing can be used again; one with anything in it, or a run at work, cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.errors import SpecError
from raypipe.observe.run_dir import hold, put_aside, stillborn
from raypipe.observe.run_log import RunLog


def begun(directory: Path) -> Path:
    """As a run leaves it that fails before its first step."""
    log = RunLog(directory)
    log.event("run", resume=False)
    log.event("failed", message="no memory")
    log.close()
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
        with pytest.raises(SpecError, match="is at work in it"):
            hold(tmp_path)
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.communicate()
    hold(tmp_path).close()
