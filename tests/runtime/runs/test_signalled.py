"""SIGTERM while Ray starts, and to a script that trains by the Python API."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raypipe.observe.run_log import EVENTS, METRICS, read_rows
from tests.exhaustive import exhaustive
from tests.processes import named, session_of
from tests.ray_environment import without_ray
from tests.runtime.runs.test_train_command import small_job

pytestmark = [pytest.mark.runs, pytest.mark.own_ray]
SCRIPT = """
from tests.ray_environment import small_rays
import raypipe
forks = small_rays()
forks.__enter__()
rows = [{{"input_ids": [n % 7, 3, 5, n % 5], "labels": [n % 7, 3, 5, n % 5]}} for n in range(32)]
config = {{"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 16}}
args = {{"output_dir": {directory!r}, "max_steps": 100000, "per_device_train_batch_size": 8, "save_strategy": "no"}}
raypipe.init({degrees})
raypipe.PipelineTrainer(model={{"hf": "gpt2", "config": config}}, args=args, train_dataset=rows).train()
print("never")
"""


def script_for(directory: Path, degrees: str) -> str:
    return SCRIPT.format(directory=str(directory), degrees=degrees)


@contextmanager
def signalled(
    words: list[str], number: int, there: Callable[[int], bool], every_s: float = 0.02
) -> Iterator[tuple[int, str, str]]:
    """Start a Python, send the signal when it is ``there``, by its pid; yield status and both outputs."""
    with subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=without_ray(RAY_ADDRESS="local"),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        deadline = time.monotonic() + 240
        while process.poll() is None and not there(process.pid):
            assert time.monotonic() < deadline
            time.sleep(every_s)
        family = session_of(process.pid)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    yield process.returncode, out, err
    deadline = time.monotonic() + 20
    while left := {pid for pid in family if Path(f"/proc/{pid}").exists()}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("number", "script", "status", "said"),
    [
        (signal.SIGINT, False, 130, "interrupted"),
        (signal.SIGTERM, True, 143, "ended by SIGTERM"),
        *exhaustive((signal.SIGTERM, False, 143, "ended by SIGTERM")),
    ],
)
def test_while_ray_starts(number: int, script: bool, status: int, said: str, text_folder: Path, tmp_path: Path) -> None:
    job, directory = small_job(tmp_path / "job.yaml", text_folder, 100000), tmp_path / "run"
    words = (
        ["-c", script_for(directory, "")]
        if script
        else ["-m", "raypipe", "train", str(job), "--run-dir", str(directory)]
    )

    def starts(pid: int) -> bool:
        family = session_of(pid)
        return bool(named(family, "gcs_server")) and not named(family, "raylet")

    with signalled(words, number, starts) as ended:
        assert (ended[0], ended[1]) == (status, "")
        assert ended[2].count(said) == 1, ended[2]
        assert "Traceback" not in ended[2]
    assert not read_rows(directory / METRICS)


def test_a_script_of_the_python_api(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    words = ["-c", script_for(directory, "pp=2")]

    def trains(_: int) -> bool:
        return len(read_rows(directory / METRICS)) >= 3

    with signalled(words, signal.SIGTERM, trains, 0.2) as (status, out, err):
        assert status == 143, err
        assert "never" not in out
        (event,) = [row for row in read_rows(directory / EVENTS) if row["event"] == "interrupted"]
        assert err.splitlines()[-1] == f"ended by SIGTERM after step {event['step']}, with a checkpoint of it"
        assert err.count("SIGTERM") == 1
        assert "Traceback" not in err
        assert "stack" not in err
    assert (directory / "checkpoints" / f"step-{event['step']:08d}" / "manifest.json").exists()


STUCK = """
import atexit, os, time, ray
from raypipe.runtime.cluster.connect import connect

@ray.remote(num_cpus=0)
class Stuck:
    def pid(self):
        return os.getpid()

    def end(self):
        atexit.register(time.sleep, 600)  # as one of Ray's that waits for itself
        ray.actor.exit_actor()

connect(1)
stuck = Stuck.remote()
print(ray.get(stuck.pid.remote()))
try:
    ray.get(stuck.end.remote())
except ray.exceptions.RayActorError:
    pass
"""


def test_a_process_of_ray_that_does_not_end_is_ended() -> None:
    environment = without_ray(RAY_ADDRESS="local")
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 20
    while Path(f"/proc/{int(done.stdout)}").exists():  # until whoever inherits it has taken note
        assert time.monotonic() < deadline
        time.sleep(0.1)
