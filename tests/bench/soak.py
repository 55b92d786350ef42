"""Disturb short runs at random for hours: each must end with the losses of an undisturbed one and leave nothing behind.

    python -m tests.bench.soak --hours H [--steps 400] [--every 8] [--shape SHAPE ...] [--fault FAULT ...] [--seed 0]
                               [--json FILE]

Run after run, in turn over the shapes (SCHEDULE:STAGESxREPLICAS[:SHARD], as in ``tests.bench.runtime.recoveries``),
until the time is over. Every ``--every`` seconds, once the run has gone on since the fault before, one of these:

    worker    a random worker is killed (SIGKILL)
    driver    the driver is killed
    pause     a random worker is stopped (SIGSTOP) for up to 3 s
    hang      a random worker is stopped for good: others wait ``message_timeout_s``, 10 s, and it has to be replaced
    disk      the disk of the run directory, a tmpfs of its own, is full for 3 s; needs root

A run that fails for a full disk, which raises where it writes, is resumed. What must not be there after a run:
processes of its workers, names in /dev/shm, placement groups, named actors, unfinished files in its directory. Prints a
line per run and, at the end, the seconds from each kind of fault to the next step; exit status 1 where a run was not
sound.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util import list_named_actors, placement_group_table

from tests.bench.command import options, write_rows
from tests.bench.runtime.kill_workers import ended
from tests.bench.runtime.recoveries import alive, has_twins, newest, pids_of, recovered_job, train
from tests.bench.runtime.soak import shared_names
from tests.job_files import write_text
from tests.processes import descendants
from tests.ray_environment import start_ray
from tests.runtime.runs.killing import DRIVER, events

SHAPES = ("1f1b:2x1", "1f1b:2x2", "zb-v:2x1", "1f1b:2x2:zero3", "chimera:2x1")
FAULTS = ("worker", "driver", "pause", "hang", "disk")
RUN_S = 1200.0
PAUSE_S, FULL_S, LEFT_S = 3.0, 3.0, 15.0
"""Longest pause, how long the disk is full, and how long what is left may take to go."""
DISK = "64m"
WORKERS = "ray::Stage"


@dataclass(slots=True)
class Run:
    """One disturbed run."""

    shape: str
    faults: list[tuple[str, float]] = field(default_factory=list)
    """Each fault, with the seconds from it to the next step done."""
    repeated: list[int] = field(default_factory=list)
    resumed: int = 0
    status: int = -1
    wrong: list[str] = field(default_factory=list)
    """Why it is not sound."""


def stop(pids: list[int], seconds: float | None) -> None:
    """Stop a random process, for good or for some seconds."""
    pid = random.choice(pids)
    os.kill(pid, signal.SIGSTOP)
    if seconds is not None:
        time.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def fill(disk: Path) -> None:
    """Leave no room on a disk for a while."""
    blob = disk / "blob"
    with suppress(OSError), blob.open("wb", buffering=0) as out:
        while True:
            out.write(bytes(1 << 20))
    time.sleep(FULL_S)
    blob.unlink()


OF_RAY_TRAIN = {"AutoscalingCoordinator", "train_v2_state_actor"}
"""Named actors that Ray Train starts once on a cluster, and that stay as long as it."""


def happen(fault: str, directory: Path) -> bool:
    """Have a fault happen; return whether there was something that it could happen to."""
    pids = [pid for pid in pids_of(directory) if alive(pid)]
    drivers = [pid for pid, title in descendants(os.getpid()).items() if title.startswith(DRIVER)]
    try:
        if fault == "disk":
            fill(directory.parent)
        elif fault == "driver":
            os.kill(min(drivers), signal.SIGKILL)
        elif fault == "worker":
            os.kill(random.choice(pids), signal.SIGKILL)
        else:
            stop(pids, random.uniform(0.1, PAUSE_S) if fault == "pause" else None)
    except (ProcessLookupError, ValueError, IndexError):
        return False
    return True


def left(directory: Path, shared: set[str]) -> list[str]:
    """Return what a run has left behind, once that had time to go."""
    deadline = time.monotonic() + LEFT_S
    while True:
        titles = [title for title in descendants(os.getpid()).values() if title.startswith((WORKERS, "ray::Keeper"))]
        groups = [one["name"] for one in placement_group_table().values() if one["state"] not in ("REMOVED",)]
        actors = {one["name"] for one in list_named_actors(all_namespaces=True)} - OF_RAY_TRAIN
        files = [str(path) for path in directory.rglob("*") if path.suffix in (".partial", ".tmp")]
        result = [*titles, *(shared_names() - shared), *map(str, groups), *map(str, actors), *files]
        if not result or time.monotonic() > deadline:
            return result
        time.sleep(0.5)


def disturb(
    shape: str, job: Path, directory: Path, losses: list[float], kinds: list[str], every: float, *extra: str
) -> Run:
    """Run a job to its end under faults."""
    run, shared = Run(shape), shared_names()
    process = train(job, directory, *extra)
    due = time.monotonic() + every
    while True:
        while process.poll() is None:
            time.sleep(0.05)
            if time.monotonic() < due or newest(directory) < 3:
                continue
            fault, began, before = random.choice(kinds), time.monotonic(), newest(directory)
            if not happen(fault, directory):
                continue
            known = len(events(directory, "recovered")) + len(events(directory, "restarted"))
            while process.poll() is None and newest(directory) <= before and time.monotonic() < began + 120:
                time.sleep(0.02)
                more = len(events(directory, "recovered")) + len(events(directory, "restarted"))
                if more > known:  # its steps since then may be repeated
                    known, before = more, min(before, newest(directory))
            run.faults.append((fault, time.monotonic() - began))
            due = time.monotonic() + random.uniform(0.5, 1.5) * every
        run.status, result, said = ended(process, RUN_S)
        full = any(fault == "disk" for fault, _ in run.faults)
        if run.status == 0 or not full or run.resumed >= len(run.faults):
            break
        run.resumed += 1
        process = train(job, directory, "--resume", *extra)
    if run.status:
        run.wrong.append(f"status {run.status}: {said.strip()[-400:]}")
    elif result.get("losses") != losses:
        apart = [
            step for step, (one, other) in enumerate(zip(result["losses"], losses, strict=False), 1) if one != other
        ]
        run.wrong.append(f"the losses of {len(apart)} steps differ, the first of step {min(apart, default=-1)}")
    run.repeated = [e["steps_repeated"] for k in ("recovered", "restarted") for e in events(directory, k)]
    if leaves := left(directory, shared):
        run.wrong.append(f"left behind: {', '.join(leaves)}")
    return run


def on_tmpfs(path: Path) -> bool:
    """Make a folder a small file system of its own; return whether that was possible."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(path)], capture_output=True)
    return mounted.returncode == 0


def figures(found: list[Run]) -> str:
    """Return seconds to the next step by kind of fault."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for run in found:
        for fault, seconds in run.faults:
            by_kind[fault].append(seconds)
    return "\n".join(
        f"{kind:7s} {len(seconds):4d} times, next step after {statistics.median(seconds):5.1f} s (median), "
        f"most {max(seconds):5.1f} s"
        for kind, seconds in sorted(by_kind.items())
    )


def main() -> int:
    """Print a line per run, then all figures; exit status 1 where a run was not sound."""
    args = options(__doc__, hours=0.1, steps=400, every=8.0, shape=SHAPES, fault=FAULTS, seed=0, json=Path)
    random.seed(args.seed)
    os.environ["RAY_ADDRESS"] = start_ray(8, forks=False)
    ends = time.monotonic() + 3600 * args.hours
    found: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="raypipe-soak-") as name:
        folder, disk = Path(name), Path(name) / "disk"
        mounted, kinds = on_tmpfs(disk), list(args.fault)
        if not mounted and "disk" in kinds:
            kinds.remove("disk")
            print("no full disks: this user cannot mount a tmpfs", file=sys.stderr)
        try:
            text = write_text(folder / "text")
            undisturbed: dict[str, tuple[Path, list[float]]] = {}
            while time.monotonic() < ends or not found:
                shape = args.shape[len(found) % len(args.shape)]
                extra = ["--set", "train.message_timeout_s=10"]
                extra += [] if has_twins(shape) else ["--set", "train.copy_every=1"]
                if shape not in undisturbed:
                    undisturbed[shape] = _undisturbed(folder, text, shape, args.steps)
                job, losses = undisturbed[shape]
                directory = disk / f"run-{len(found)}"
                run = disturb(shape, job, directory, losses, kinds, args.every, *extra)
                found.append(run)
                print(
                    f"{shape}: {[fault for fault, _ in run.faults]}, {run.resumed} times resumed, repeated "
                    f"{run.repeated}: {'; '.join(run.wrong) or 'sound'}",
                    flush=True,
                )
                if not run.wrong:
                    subprocess.run(["rm", "-r", str(directory)], check=True)  # a small disk
        finally:
            if mounted:
                subprocess.run(["umount", "-l", str(disk)], check=True)
    print(figures(found))
    bad = [run for run in found if run.wrong]
    print(f"{len(found)} runs, {sum(len(run.faults) for run in found)} faults, {len(bad)} runs not sound")
    write_rows(args.json, [asdict(run) for run in found])
    ray.shutdown()
    return 1 if bad else 0


def _undisturbed(folder: Path, text: Path, shape: str, steps: int) -> tuple[Path, list[float]]:
    schedule, size, shard = [*shape.split(":"), "none"][:3]
    stages, replicas = map(int, size.split("x"))
    shaped: dict[str, Any] = {"schedule": schedule, "stages": stages, "replicas": replicas, "shard": shard}
    begin = folder / shape.replace(":", "-")
    job = recovered_job(begin.with_suffix(".yaml"), text, shaped, steps=steps, clip=1.0)
    status, result, said = ended(train(job, begin), RUN_S)
    if status:
        raise SystemExit(f"{shape} does not run undisturbed: {said}")
    return job, result["losses"]


if __name__ == "__main__":
    sys.exit(main())
