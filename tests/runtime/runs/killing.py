"""A run on a Ray whose two CPUs it needs both of, of which chosen processes are killed in the middle.

``python -m tests.runtime.runs.killing train JOB ...`` is ``raypipe train JOB ...`` on such a Ray of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from raypipe.observe.run_log import read_rows
from tests.forked_workers.setup_worker import SERVER
from tests.job_files import write_job
from tests.processes import descendants
from tests.ray_environment import start_ray, without_ray

DRIVER, CONTROLLER, WORKER = "ray::RayTrainWorker", "ray::TrainController", "ray::StageWorker"


def job_to_kill(path: Path, text: Path, steps: int) -> Path:
    """Write a job whose runs save every 50 steps."""
    return write_job(path, text, steps=steps, clip=1.0, eval_batches=2, checkpoint_every=50)


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    status: int
    result: dict[str, Any]
    """Empty if it failed."""
    said: str
    """Standard error."""
    seconds: float
    """From the last kill to the first step done after it; NaN where nothing was killed or no step followed."""


def rows(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a log, none if there is no file."""
    return read_rows(path)


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    """The run's events of one kind."""
    return [row for row in rows(directory / "events.jsonl") if row["event"] == kind]


def saved(directory: Path) -> bool:
    """Whether there is a checkpoint."""
    return bool(events(directory, "checkpoint"))


def copied_since(directory: Path) -> bool:
    """Whether there is a checkpoint, and in the memory of nodes a copy of a later step."""
    steps = [row["step"] for row in events(directory, "checkpoint")]
    return bool(steps) and any(row["step"] > steps[-1] for row in events(directory, "copied"))


def run_killing(
    titles: Sequence[str], job: Path, directory: Path, *extra: str, root: int | None = None,
    ready: Callable[[Path], bool] = saved,
) -> Outcome:  # fmt: skip
    """Run ``job`` and kill the processes called ``titles``: one when ``ready``, the next when it goes on.

    The run brings up its own Ray, unless ``root`` is the process that has started the one of RAY_ADDRESS.
    """
    program = "tests.runtime.runs.killing" if root is None else "raypipe"
    environment = dict(os.environ)
    if root is None:
        environment = without_ray()
        environment.pop(SERVER, None)  # it forks its workers itself: they are among its descendants
    process = subprocess.Popen(
        [sys.executable, "-m", program, "train", str(job), "--run-dir", str(directory), "--json", *extra],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    seconds = float("nan")
    try:
        _wait(process, lambda: not titles or ready(directory))
        for kills, title in enumerate(titles, 1):
            above = process.pid if root is None else root
            # A process that it has just forked has its title too, but comes after it.
            victim = next((pid for pid, name in descendants(above).items() if name.startswith(title)), None)
            assert victim is not None, f"no {title} is left to kill"
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            _wait(process, partial(_goes_on, directory, kills))
            seconds = time.monotonic() - began
        out, said = process.communicate(timeout=240)
    finally:
        process.terminate()  # Ray's own processes end with it
    return Outcome(process.returncode, json.loads(out) if process.returncode == 0 else {}, said, seconds)


def _goes_on(directory: Path, kills: int) -> bool:
    """Whether the attempt after so many kills has done a step."""
    started = events(directory, "started")
    steps = [row["step"] for row in rows(directory / "metrics.jsonl") if "loss" in row]
    return len(started) > kills and bool(steps) and steps[-1] > (started[-1]["resumed_from"] or 0)


def _wait(process: subprocess.Popen[str], there: Callable[[], bool], limit_s: float = 240.0) -> None:
    """Until it is there, or the process has ended."""
    deadline = time.monotonic() + limit_s
    while not there() and process.poll() is None:
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.02)


def main() -> NoReturn:
    from raypipe.cli import main as command

    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    start_ray(2)
    command()


if __name__ == "__main__":
    main()
