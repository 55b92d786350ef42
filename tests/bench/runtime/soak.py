"""Train for long with checkpoints and kills, and see whether memory, processes, files or shared memory grow.

    python -m tests.bench.runtime.soak [--minutes 30] [--warm-up 5] [--every 60] [--checkpoint-every 300] [--json FILE]

Two stages in two copies; a random worker is killed (SIGKILL) every ``--every`` seconds, until two such times before the
end, and replaced in place. Every few
seconds the bench reads the memory that each process has to itself (USS, MiB) of the driver and of the workers that have
lived for half a minute, their open files, the number of processes below Ray, and what is in /dev/shm beside Ray's own.
Prints their medians in the first and the last third of the time after the warm-up. Exit status 1 if memory has grown by
more than 5 %, open files, processes or shared memory at all, something is left after the end, or the run fails.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil

from raypipe.observe.run_dir import STOP, ask
from tests.bench.command import options, write_rows
from tests.bench.runtime.recoveries import Train, alive, newest, pids_of, recovered_job
from tests.job_files import write_text
from tests.processes import descendants
from tests.ray_environment import start_ray
from tests.runtime.runs.killing import DRIVER, events

SAMPLE_S, SETTLED_S = 3.0, 30.0
GROWTH = 1.05
SHARED = Path("/dev/shm")
MIB = 1 << 20


@dataclass(slots=True)
class Sample:
    """What was there at one moment; ``None`` where a process could not be read."""

    second: float
    driver: float | None
    workers: float | None
    files: float | None
    processes: int
    shared: int


def own_mib(pid: int) -> float | None:
    """Return the memory that a process shares with no other one, in MiB."""
    with suppress(psutil.Error):
        return float(psutil.Process(pid).memory_full_info().uss) / MIB
    return None


def open_files(pid: int) -> int | None:
    """Return how many descriptors a process has open."""
    with suppress(psutil.Error):
        return int(psutil.Process(pid).num_fds())
    return None


def shared_names() -> set[str]:
    """Return what is in shared memory and not Ray's object store."""
    return {entry.name for entry in SHARED.iterdir() if not entry.name.startswith("plasma")}


def mean(values: list[float | None]) -> float | None:
    """Return the mean of those that are known, if there are any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


class Watch:
    """Samples of one run."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._began, self._before = directory, time.monotonic(), shared_names()
        self._since: dict[int, float] = {}
        self.samples: list[Sample] = []

    def look(self) -> None:
        """Take a sample."""
        now = time.monotonic()
        pids = [pid for pid in pids_of(self._directory) if alive(pid)]
        for pid in pids:
            self._since.setdefault(pid, now)
        settled = [pid for pid in pids if now - self._since[pid] > SETTLED_S]
        below = descendants(os.getpid())
        drivers = [pid for pid, title in below.items() if title.startswith(DRIVER)]
        driver = min(drivers, default=-1)
        self.samples.append(
            Sample(
                now - self._began, own_mib(driver), mean([own_mib(pid) for pid in settled]),
                mean([open_files(pid) for pid in [driver, *settled]]), len(below),
                len(shared_names() - self._before),
            )
        )  # fmt: skip

    def left(self) -> list[str]:
        """What the run has left: shared memory, and processes of its workers."""
        titles = [title for title in descendants(os.getpid()).values() if title.startswith("ray::Stage")]
        return [*(shared_names() - self._before), *titles]


def thirds(samples: list[Sample], value: Callable[[Sample], float | None]) -> tuple[float, float]:
    """Return the medians of a value in the first and in the last third of the samples."""
    size = max(1, len(samples) // 3)
    first, last = (
        [known for sample in part if (known := value(sample)) is not None] for part in (samples[:size], samples[-size:])
    )
    return median(first), median(last)


def main() -> int:
    """Print how each quantity changed; exit status 1 where one grew."""
    args = options(__doc__, minutes=30.0, warm_up=5.0, every=60.0, checkpoint_every=300, json=Path)
    os.environ["RAY_ADDRESS"] = start_ray(8, forks=False)
    with tempfile.TemporaryDirectory(prefix="raypipe-soak-") as name:
        folder = Path(name)
        directory, text = folder / "run", write_text(folder / "text")
        shape = {"schedule": "1f1b", "stages": 2, "replicas": 2}
        job = recovered_job(folder / "job.yaml", text, shape, steps=10**6, clip=1.0)
        watch = Watch(directory)
        process = Train(job, directory, "--set", f"train.checkpoint_every={args.checkpoint_every}")
        kills, due, looked = 0, time.monotonic() + args.every, 0.0
        ends = time.monotonic() + 60 * args.minutes
        while process.poll() is None and time.monotonic() < ends:
            time.sleep(0.2)
            now = time.monotonic()
            if now > looked + SAMPLE_S:
                looked = now
                watch.look()
            if (
                due < now < ends - 2 * args.every
                and newest(directory) > 3
                and len(events(directory, "recovered")) == kills
            ):
                with suppress(ProcessLookupError):
                    os.kill(random.choice(pids_of(directory)), signal.SIGKILL)
                    kills += 1
                due = now + args.every
        if process.poll() is None:
            ask(directory, STOP, "enough")
        status, result, said = process.ended()
        steps = len(result.get("losses", []))
        recovered, saved = len(events(directory, "recovered")), len(events(directory, "checkpoint"))
        time.sleep(5.0)
        left = watch.left()
    if status:
        print(said[-3000:], file=sys.stderr)
    counted = [sample for sample in watch.samples if sample.second > 60 * args.warm_up]
    write_rows(args.json, [asdict(sample) for sample in watch.samples])
    print(f"{steps} steps, {kills} kills, {recovered} replaced in place, {saved} checkpoints, status {status}")
    bad = bool(status or left or recovered != kills)
    quantities: tuple[tuple[str, Callable[[Sample], float | None], float], ...] = (
        ("driver, MiB", lambda sample: sample.driver, GROWTH),
        ("worker, MiB", lambda sample: sample.workers, GROWTH),
        ("open files of a process", lambda sample: sample.files, GROWTH),
        ("processes", lambda sample: sample.processes, 1.0),
        ("shared memory, names", lambda sample: sample.shared, 1.0),
    )
    for what, value, limit in quantities:
        first, last = thirds(counted, value)
        grown = last > first * limit
        bad |= grown
        print(f"{what:24s} {first:8.1f} -> {last:8.1f}{'  has grown' if grown else ''}")
    print(f"left afterwards: {', '.join(left) or 'nothing'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
