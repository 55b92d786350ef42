"""Runs of the command on machines that are full: a disk, and devices that others have."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.cli import run as command
from raypipe.observe.run_log import METRICS, read_rows
from tests.ray_environment import may_mount, without_ray
from tests.runtime.runs.test_train_command import small_job

pytestmark = [pytest.mark.runs, pytest.mark.own_ray]
FORKS = "tests.forked_workers.command"


def run(mounts: str, program: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``program`` as raypipe after shell commands that mount something; these only where that is allowed."""
    command = shlex.join([sys.executable, "-m", program, *words])
    apart = ["unshare", "-m", "--propagation", "private"] if mounts else []
    return subprocess.run(
        [*apart, "bash", "-ec", f"{mounts}\nexec {command}"], capture_output=True, text=True, timeout=240, check=False,
        env=without_ray(RAY_ADDRESS="local", **environment),
    )  # fmt: skip


@pytest.fixture
def job(text_folder: Path, tmp_path: Path) -> Path:
    return small_job(tmp_path / "größe – 1.yaml", text_folder, 40)


def test_a_disk_that_fills_is_one_error_and_the_run_goes_on_from_the_checkpoint_before(
    job: Path, tmp_path: Path, driver_here: None
) -> None:
    if not may_mount():
        pytest.skip("no file system can be mounted here")
    disk = tmp_path / "disk"
    disk.mkdir()
    kept = tmp_path / "kept"
    words = ["train", str(job), "--run-dir", str(disk / "run")]
    words += ["--set", "train.checkpoint_every=1", "--set", "train.keep_checkpoints=100"]
    # What the small disk holds is copied away when the command has ended: it goes with the namespace.
    full = f"mount -t tmpfs -o size=4m tmpfs {disk}\ntrap 'cp -r {disk}/run {kept}' EXIT\nexec() {{ \"$@\"; }}"
    done = run(full, FORKS, *words)
    assert done.returncode == 1, done.stdout
    assert done.stderr.count("No space left on device") == 1, done.stderr
    assert str(disk / "run") in done.stderr
    assert "Traceback" not in done.stderr
    before = len(read_rows(kept / METRICS))
    assert 0 < before < 40
    (disk / "run").parent.rmdir()
    kept.rename(disk)
    assert command(["train", str(job), "--run-dir", str(disk), "--resume"]) == 0
    assert max(row["step"] for row in read_rows(disk / METRICS)) == 40


# A job on a cluster that others have filled waits in the open, and costs no restart.

CODE = """
import os, sys, threading
os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
from raypipe.cli import run
from raypipe.runtime.hosts.devices import DeviceRequest
from raypipe.runtime.hosts.reserve import reserve
from tests.driver_here import without_ray_train
from tests.ray_environment import start_ray
without_ray_train()
start_ray(2)
other = reserve(2, DeviceRequest(1.0, 0.0), 60.0)
assert run([*sys.argv[1:], "--run-dir", sys.argv[2] + ".given-up", "--set", "train.wait_for_devices_s=2"]) == 1
threading.Timer(3.0, other.give_back).start()
sys.exit(run([*sys.argv[1:], "--run-dir", sys.argv[2] + ".waited", "--set", "train.max_failures=0"]))
"""


def test_it_waits_says_so_and_runs(text_folder: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job.yaml", text_folder, 4)
    done = subprocess.run(
        [sys.executable, "-c", CODE, "train", str(job)], capture_output=True, text=True, timeout=240, env=without_ray()
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith(("needs", "devices: "))]
    assert re.fullmatch(r"needs 2 CPUs, 0 free, waiting 0:0[1-9]", lines[0]), done.stderr
    given_up = lines.index("devices: 2 x 1 CPU were not free within 2 s")
    assert lines[given_up + 1].startswith("needs 2 CPUs, 0 free, waiting 0:0")
    assert "failed: " not in done.stderr
    assert "Traceback" not in done.stderr
