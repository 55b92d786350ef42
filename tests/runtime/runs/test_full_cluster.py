"""A job on a cluster that others have filled waits in the open, and costs no restart."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray_environment import without_ray
from tests.runtime.runs.killing import JOB

pytestmark = pytest.mark.runs
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
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(path=text_folder, steps=4))
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
