"""Runs `raypipe train` over the GPU shim: its own Ray, Ray Train, workers with a fake GPU each, and random delays."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.observe.run_log import EVENTS, METRICS, read_rows
from tests.gpu_shim.shim import PYTHON, environment
from tests.job_files import write_job
from tests.processes import session_of
from tests.ray_environment import without_ray

GONE_S = 20.0
"""How long the processes of a run may take to end after it."""
MOST_GPUS = 64
"""Of cuda.c: the file of its counts has what is taken of so many GPUs now, and then at most so far."""
A_STEP = " in run_step"
"""The function of a worker that issues a step, as stacks name it; what it calls may not wait for the GPU."""
FIRST_MARK = "process/clock.py"
"""The one wait of a worker's first step: before it there was no event from which times could be counted."""


@dataclass(frozen=True)
class Wait:
    """A wait of a worker's host for its GPU."""

    pid: int
    what: str
    time: float
    stack: tuple[str, ...]
    """Python's, innermost first; empty in a thread without Python, such as autograd's."""


@dataclass(frozen=True)
class Run:
    """What became of a run."""

    status: int
    said: str
    """Its output and its errors."""
    directory: Path
    left: tuple[int, ...]
    """Processes that were still there ``GONE_S`` after its end; they are killed."""
    waits: tuple[Wait, ...]
    most_bytes: tuple[int, ...]
    """What was taken of each GPU at the fullest moment, by the shim's count."""

    @property
    def losses(self) -> list[float]:
        """The loss of each step; of no meaning, because kernels compute nothing."""
        return [row["loss"] for row in read_rows(self.directory / METRICS) if "loss" in row]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The run's events of one kind."""
        return [row for row in read_rows(self.directory / EVENTS) if row["event"] == kind]

    def waits_in_steps(self) -> list[Wait]:
        """The waits while a step was issued, by their stacks, or while steps were, in a thread without Python.

        Each worker's first, of its clock, is none of them.
        """
        begun, ended = self.events("started")[0], self.events("finished")[-1]
        pids = {device["pid"] for device in begun["devices"]}
        within = [w for w in self.waits if any(A_STEP in line for line in w.stack)]
        for pid in pids:
            first = next((w for w in within if w.pid == pid), None)
            if first is not None and any(FIRST_MARK in line for line in first.stack):
                within.remove(first)
        return within + [
            w for w in self.waits if w.pid in pids and not w.stack and begun["time"] < w.time < ended["time"]
        ]


def train(
    folder: Path, text: Path, parallel: dict[str, Any], devices: int, meanwhile: Callable[[Path], None] | None = None,
    *, limit_s: float = 400.0, layers: int = 2, extra: Sequence[str] = (), settings: dict[str, object] | None = None,
    **keys: Any,
) -> Run:  # fmt: skip
    """Run a job to its end, or kill it after ``limit_s``.

    Args:
        folder: empty; the run's files go there.
        text: what it trains on.
        parallel: of the job.
        devices: how many GPUs there are.
        meanwhile: called with the run's directory when the run has begun; may wait, and kill.
        extra: more words of the command.
        settings: more of the shim's.
        keys: ``train``'s in the job.
    """
    meeting, directory = folder / "shim", folder / "run"
    job = write_job(folder / "job.yaml", text, parallel, layers=layers, hidden=64, **{"eval_every": 1000, **keys})
    variables = of_command(meeting, {"devices": devices, "kernel_us": 200, **(settings or {})})
    words = [str(PYTHON), "-m", "raypipe", "train", str(job), "--run-dir", str(directory), *extra]
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(words, cwd=folder, stdout=said, stderr=said, env=variables, start_new_session=True)
    family = {process.pid}
    deadline = time.monotonic() + limit_s
    try:
        if meanwhile is not None:
            until(lambda: process.poll() is not None or EVENT_STARTED in _events(directory), limit_s)
            family |= session_of(process.pid)
            meanwhile(directory)
        while process.poll() is None and time.monotonic() < deadline:
            family |= session_of(process.pid)
            time.sleep(0.5)
    finally:
        family |= session_of(process.pid)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60.0)
        with contextlib.suppress(AssertionError):
            until(lambda: not _alive(family), GONE_S)
        left = _alive(family)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    waits = [wait for file in sorted(meeting.glob("waits-*")) for wait in read_waits(file)]
    most = struct.unpack(f"{MOST_GPUS}q", (meeting / "memory").read_bytes()[8 * MOST_GPUS : 16 * MOST_GPUS])
    said_text = (folder / "said").read_text()
    return Run(process.returncode, said_text, directory, tuple(sorted(left)), tuple(waits), most)


def of_command(meeting: Path, settings: dict[str, object]) -> dict[str, str]:
    """Return the environment of a command that starts a Ray of its own, whose processes meet in a new folder."""
    meeting.mkdir()
    cache = str(meeting.parent / "cache")
    return without_ray(RAY_ADDRESS="local", RAYPIPE_CACHE_DIR=cache, **environment(str(meeting), **settings))


EVENT_STARTED = "started"


def _events(directory: Path) -> set[str]:
    with contextlib.suppress(FileNotFoundError):
        return {row["event"] for row in read_rows(directory / EVENTS)}
    return set()


def _alive(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                found.add(pid)
    return found


def until(holds: Callable[[], bool], limit_s: float) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s"
        time.sleep(0.02)


def read_waits(file: Path) -> list[Wait]:
    """Read what the shim has written about a process's waits."""
    found: list[tuple[str, float, list[str]]] = []
    for line in file.read_text(errors="replace").splitlines():
        if begun := re.fullmatch(r"(\w.*) (\d+\.\d{9})", line):
            found.append((begun[1], float(begun[2]), []))
        elif line.startswith("  ") and found:
            found[-1][2].append(line.strip())
    return [Wait(int(file.name.partition("-")[2]), what, at, tuple(stack)) for what, at, stack in found]
