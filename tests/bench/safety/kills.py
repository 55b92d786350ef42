"""Send SIGTERM and SIGINT to `raypipe train` at every part of a run, and resume what is left.

`python -m tests.bench.safety.kills`: 30 runs, half an hour on two cores; `--only MOMENT` for some of them. Each has to
end with 143 or 130 and one message, leave no process and no file in /dev/shm, and either have a whole checkpoint of
its last step, from which it goes on, or have made no step.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from raypipe.checkpoint import latest, open_checkpoint
from raypipe.checkpoint.write import NAME
from raypipe.observe.run_log import EVENTS, METRICS, read_rows
from tests.job_files import write_job
from tests.processes import session_of
from tests.ray_environment import without_ray

PLAIN = {"steps": 100000, "eval_every": 100, "eval_batches": 2, "checkpoint_every": 50}
EVERY, ERR = 20, "err"
START_S, END_S, GONE_S = 300.0, 60.0, 20.0


def _steps(run: Path) -> int:
    return sum("loss" in row for row in read_rows(run / METRICS))


def _begun(run: Path, event: str) -> bool:
    return any(row["event"] == event for row in read_rows(run / EVENTS))


def _profiling(run: Path) -> bool:
    said = (run.parent / ERR).read_text()
    return "micro-batches of" in said and "measured in" not in said


def _saving(run: Path) -> bool:
    """Some of the newest checkpoint is there, and its manifest is not."""
    newest = max((run / "checkpoints").glob("step-*"), default=None)
    return newest is not None and any(newest.iterdir()) and not (newest / NAME).exists()


def _evaluating(run: Path) -> bool:
    """A step is done that a validation follows, of which there is no loss yet."""
    rows = read_rows(run / METRICS)
    return bool(rows) and "loss" in rows[-1] and rows[-1]["step"] % EVERY == 0


MOMENTS: dict[str, tuple[Callable[[Path], bool], tuple[float, ...], dict[str, object]]] = {
    "set-up": (lambda _: True, (0.3, 1.5, 3.0, 5.0, 7.0), {}),
    "profiling": (_profiling, (0.0, 0.5), {"parallel": "auto"}),
    "step 1": (lambda run: _begun(run, "started"), (0.0, 0.1), {}),
    "mid-run": (lambda run: _steps(run) >= 60, (0.0, 0.3), {}),
    "save": (_saving, (0.0, 0.3), {"checkpoint_every": 5}),
    "evaluation": (_evaluating, (0.0, 0.2), {"eval_every": EVERY, "eval_batches": 400}),
}
"""When it is sent, how long after that in seconds, at least, and what the job then has: it is sent when that is so."""


def cases() -> Iterator[tuple[str, float, signal.Signals]]:
    """Every case: the moment, the delay, the signal."""
    for moment, (_, delays, _) in MOMENTS.items():
        for delay in delays:
            for number in (signal.SIGTERM, signal.SIGINT):
                yield moment, delay, number


def _shared_memory() -> set[str]:
    return {entry.name for entry in os.scandir("/dev/shm")}


def _used() -> str:
    """The maps of all processes, which name the files of /dev/shm that somebody still uses."""
    text = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text.append(maps.read_text())
        except OSError:
            continue
    return "".join(text)


def trial(moment: str, delay: float, number: signal.Signals, folder: Path) -> str:
    """Run one case; return what happened, or raise AssertionError."""
    due, _, keys = MOMENTS[moment]
    job, run = write_job(folder / "job.yaml", Path(__file__).parents[2], **{**PLAIN, **keys}), folder / "run"
    words = [sys.executable, "-m", "raypipe", "train", str(job), "--run-dir", str(run)]
    before, environment = _shared_memory(), without_ray(RAY_ADDRESS="local", RAYPIPE_CACHE_DIR=str(folder / "cache"))
    with (folder / ERR).open("w") as err:
        process = subprocess.Popen(
            words, stdout=err, stderr=err, env=environment, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
    deadline = time.monotonic() + START_S
    for wait in (delay, None):  # when it is due for the first time, and again
        while not due(run):
            assert process.poll() is None, (folder / ERR).read_text()
            assert time.monotonic() < deadline, f"no {moment}"
            time.sleep(0.002)
        if wait is not None:
            time.sleep(wait)
            family = session_of(process.pid)
    process.send_signal(number)
    family |= session_of(process.pid)
    began = time.monotonic()
    status = process.wait(END_S)
    took = time.monotonic() - began
    text = (folder / ERR).read_text()
    # Python itself has no handler yet in its first tenths of a second.
    early = {-number} if moment == "set-up" and delay < 1 else set()
    assert status in {128 + number} | early, f"status {status}: {text}"
    for word in ("Traceback", "*** SIG", "stack trace"):
        assert early or word not in text, text
    deadline = time.monotonic() + GONE_S
    while left := {pid for pid in family | session_of(process.pid) if Path(f"/proc/{pid}").exists()}:
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.1)
    used = _used()
    assert not (files := {n for n in _shared_memory() - before if n not in used}), f"left in /dev/shm: {files}"
    if not _steps(run):
        return f"ended in {took:.1f} s, never started"
    newest, notices = latest(run / "checkpoints")
    assert newest is not None, f"no checkpoint after {_steps(run)} steps"
    assert not notices, notices
    step = open_checkpoint(newest).step
    assert step == _steps(run), f"checkpoint of step {step}, {_steps(run)} steps"
    more = [*words, "--resume", "--set", f"train.steps={step + 2}", "--set", "train.eval_batches=1"]
    done = subprocess.run(more, capture_output=True, text=True, env=environment, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr
    assert _steps(run) == step + 2
    return f"ended in {took:.1f} s after step {step}, resumed"


def main() -> int:
    """Run all cases and print each; return the number that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(MOMENTS), action="append", help="only this moment; repeatable")
    parser.add_argument("--one-each", action="store_true", help="only the first delay of each moment")
    asked = parser.parse_args()
    failed = count = 0
    for moment, delay, number in cases():
        if (asked.only and moment not in asked.only) or (asked.one_each and delay != MOMENTS[moment][1][0]):
            continue
        count += 1
        with tempfile.TemporaryDirectory(prefix="kills-") as folder:
            try:
                said = trial(moment, delay, number, Path(folder))
            except (AssertionError, subprocess.TimeoutExpired) as error:
                failed += 1
                said = f"FAILED: {error}"
        print(f"{number.name:8} {moment:11} +{delay:.2f} s  {said}", flush=True)
    print(f"{count - failed} of {count}")
    return failed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
