"""Workers that measured their devices for ``parallel: auto`` train the job on them, and hold them no longer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.observe.run_log import EVENTS, METRICS, read_rows
from raypipe.train import saved_job
from tests.ray_environment import without_ray
from tests.runtime.runs.plain_training import plain_losses

pytestmark = [pytest.mark.runs, pytest.mark.own_ray]

SCRIPT = """
import json, sys, time
from pathlib import Path
import ray
import raypipe.train
from raypipe.runtime.hosts.reserve import _idle
from raypipe.train import execute, prepare_run
from tests.runtime.runs.test_exactness import make_job

text, directory = map(Path, sys.argv[1:])
job = make_job(text, {"auto": True, "stages": 2})
prepared = prepare_run(job, directory / "run", resume=False)
pids = [ray.get(actor.locate.remote()).pid for idle in _idle for actor in idle.actors.values()]
execute(prepared, None, lambda: None)

def fails(*_):
    raise RuntimeError("after planning")
raypipe.train.units_of = fails
try:
    prepare_run(job, directory / "other", resume=False)
except RuntimeError as error:
    assert str(error) == "after planning", error
deadline = time.monotonic() + 30
while (free := ray.available_resources().get("CPU", 0.0)) < ray.cluster_resources()["CPU"]:
    assert time.monotonic() < deadline, free
    time.sleep(0.1)
print(json.dumps(pids))
"""


def test_they_train_the_job_exactly_and_are_released_where_it_cannot_begin(text_folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(text_folder), str(tmp_path)], capture_output=True, text=True,
        env=without_ray(RAY_ADDRESS="local", RAYPIPE_CACHE_DIR=str(tmp_path / "cache")), timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    started = next(e for e in read_rows(tmp_path / "run" / EVENTS) if e["event"] == "started")
    assert len(measured) == 2
    assert {device["pid"] for device in started["devices"]} == set(measured)
    losses = [row["loss"] for row in read_rows(tmp_path / "run" / METRICS) if "loss" in row]
    job = saved_job(tmp_path / "run")
    assert losses == pytest.approx(plain_losses(job, tmp_path / "run" / "data", job.train.steps), abs=1e-9, rel=0)
