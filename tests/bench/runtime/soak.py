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

import argparse
import json
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

from raypipe.observe.run_dir import STOP, ask
from tests.bench.runtime.kill_driver import text_in
from tests.bench.runtime.kill_workers import ended
from tests.bench.runtime.recoveries import JOB, RUN_S, alive, newest, pids_of, train
from tests.ray_environment import start_ray
from tests.runtime.runs.killing import DRIVER, descendants, events

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
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) * 1024 / MIB
    return None


def open_files(pid: int) -> int | None:
    """Return how many descriptors a process has open."""
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
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
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.runtime.soak", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up", type=float, default=5.0, help="minutes that do not count")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--checkpoint-every", type=int, default=300, help="steps; 300 are some 20 s on two cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples")
    args = parser.parse_args()
    os.environ["RAY_ADDRESS"] = start_ray(8, forks=False)
    with tempfile.TemporaryDirectory(prefix="raypipe-soak-") as name:
        folder = Path(name)
        job, directory = folder / "job.yaml", folder / "run"
        text = text_in(folder)
        job.write_text(
            JOB.format(path=text, steps=10**6, schedule="1f1b", stages=2, replicas=2, shard="none", clip="1.0")
        )
        watch = Watch(directory)
        process = train(job, directory, "--set", f"train.checkpoint_every={args.checkpoint_every}")
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
        status, result, said = ended(process, RUN_S)
        steps = len(result.get("losses", []))
        recovered, saved = len(events(directory, "recovered")), len(events(directory, "checkpoint"))
        time.sleep(5.0)
        left = watch.left()
    if status:
        print(said[-3000:], file=sys.stderr)
    counted = [sample for sample in watch.samples if sample.second > 60 * args.warm_up]
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(sample) for sample in watch.samples]) + "\n")
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
