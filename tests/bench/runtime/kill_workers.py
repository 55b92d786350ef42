"""Kill a worker on each host in turn, in the middle of runs, and look for what it leaves behind on any host.

    python -m tests.bench.runtime.kill_workers [--hosts 3] [--times 30] [--json FILE]

The hosts are network namespaces of this machine (``tests.hosts``), with two devices each; it takes root. In every
run a worker of each host is killed (SIGKILL, at a random moment: while channels open, or in a step), each in an attempt
of its own; the run goes on from its last checkpoint and ends with the losses of an undisturbed run. Every other run has
``train.recovery: restart``: after a kill no worker of that attempt may live on any host. In the others those that were
not killed live on. Never may there be a file in /dev/shm that is not Ray's own; after a run, no process or socket of it
either. Exit status 1 if anything was left, or a run failed or lost something.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.command import options, write_rows
from tests.hosts import Host, environment, hosts, ray_cluster
from tests.job_files import write_job, write_text
from tests.runtime.runs.killing import events

PER_HOST = 2
STEPS = 120
EARLY_S, LATE_S = 4.0, 2.0
"""One half of the kills comes up to so long after the worker's process has begun, the other after its set-up."""
GONE_S = 15.0
"""Time that Ray has to end the workers of a run that is over."""
RUN_S = 240.0
WORKERS = "ray::StageWorker"
RAYS_OWN = ("plasma", "ray", "sem.mp-")
"""Beginnings of the names of Ray's own files in /dev/shm."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One of them."""

    host: int
    opening: bool
    """Whether the worker was killed before its attempt had set up."""
    left: list[str]
    """What of that attempt was left, over all hosts."""


@dataclass(slots=True)
class Run:
    """A run, and the kills in it."""

    status: int = -1
    same_losses: bool = False
    restarts: int = 0
    kills: list[Kill] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """What the whole run left."""

    @property
    def sound(self) -> bool:
        """Whether the run ended well, once for each kill restarted, and left nothing."""
        as_it_should = self.status == 0 and self.same_losses and self.restarts == len(self.kills)
        return as_it_should and not self.left and not any(kill.left for kill in self.kills)


def processes(host: Host) -> dict[int, str]:
    """Processes of this host with their titles, by the id that this machine has for them."""
    space = os.readlink(f"/proc/{host.pid}/ns/pid")
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "ns" / "pid") == space:
                    found[int(entry.name)] = (entry / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
            except OSError:  # it has ended meanwhile
                continue
    return found


def workers(host: Host) -> list[int]:
    """The host's worker processes."""
    return sorted(pid for pid, title in processes(host).items() if title.startswith(WORKERS))


def files_on(host: Host) -> list[str]:
    """Files in the host's /dev/shm that are not Ray's own."""
    return [f"/dev/shm/{name}" for name in host.run("ls", "/dev/shm").stdout.split() if not name.startswith(RAYS_OWN)]


def left_on(host: Host) -> list[str]:
    """What no run may leave on a host."""
    sockets = Path(f"/proc/{host.pid}/net/unix").read_text().splitlines()
    alive = [title for title in processes(host).values() if title.startswith(("ray::Stage", "ray::RayTrain"))]
    return (
        files_on(host) + [f"process {title}" for title in alive] + [s.split()[-1] for s in sockets if "@raypipe-" in s]
    )


def settled(look: Callable[[], list[str]]) -> list[str]:
    """What ``look`` finds once Ray has had time to end what is over."""
    deadline = time.monotonic() + GONE_S
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def left(members: list[Host]) -> list[str]:
    """What is left on all hosts."""
    return settled(lambda: [f"{host.address}: {what}" for host in members for what in left_on(host)])


def left_of(members: list[Host], old: set[int]) -> list[str]:
    """What is left of the workers ``old``, of which one was killed: they, and files on their hosts."""

    def look() -> list[str]:
        alive = [f"process {pid}" for host in members for pid in workers(host) if pid in old]
        return alive + [f"{host.address}: {what}" for host in members for what in files_on(host)]

    return settled(look)


def run_job(members: list[Host], settings: dict[str, str], job: Path, directory: Path) -> subprocess.Popen[str]:
    """Start ``raypipe train`` on the first host."""
    words = [sys.executable, "-m", "raypipe", "train", str(job), "--run-dir", str(directory), "--json"]
    return subprocess.Popen(
        members[0].command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(**settings), start_new_session=True,
    )  # fmt: skip


def ended(process: subprocess.Popen[str], timeout_s: float = RUN_S) -> tuple[int, dict[str, Any], str]:
    """Exit status, result and errors of a run; it is killed after ``timeout_s``."""
    try:
        out, said = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, said = process.communicate()
    return process.returncode, json.loads(out.splitlines()[0]) if process.returncode == 0 else {}, said


def kill_in(
    members: list[Host], settings: dict[str, str], job: Path, directory: Path, victims: Sequence[int],
    losses: list[float], in_place: bool,
) -> Run:  # fmt: skip
    """Start a run, kill a worker on each host of ``victims``, each after the restart before, and wait for the end.

    ``in_place``: the other workers live on.
    """
    run = Run()
    process = run_job(members, settings, job, directory)
    old: set[int] = set()
    for host in victims:
        begun = len(events(directory, "started"))
        present = attempt(members, process, old)
        if not present:
            break
        early = random.random() < 0.5
        while not early and len(events(directory, "started")) <= begun and process.poll() is None:
            time.sleep(0.02)
        time.sleep(random.uniform(0.0, EARLY_S if early else LATE_S))
        started = len(events(directory, "started")) > begun
        for pid in random.sample(present[host], 1):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            old |= {pid} if in_place else {pid for found in present for pid in found}
        run.kills.append(Kill(host, not started, left_of(members, old)))
    run.status, result, said = ended(process)
    if run.status:
        print(said[-2000:], file=sys.stderr)
    run.same_losses = result.get("losses") == losses
    run.restarts, run.left = len(events(directory, "restarted")), left(members)
    return run


def attempt(members: list[Host], process: subprocess.Popen[str], old: Collection[int]) -> list[list[int]]:
    """Per host, the workers of the next attempt, once all of them run; empty if the run ends before."""
    deadline = time.monotonic() + RUN_S
    while process.poll() is None and time.monotonic() < deadline:
        found = [[pid for pid in workers(host) if pid not in old] for host in members]
        if all(len(pids) == PER_HOST for pids in found):
            return found
        time.sleep(0.05)
    return []


def main() -> int:
    args = options(__doc__, hosts=3, times=30, json=Path)
    found: list[Run] = []
    with (
        tempfile.TemporaryDirectory(prefix="raypipe-kill-") as name,
        hosts(args.hosts) as members,
        ray_cluster(members, cpus=PER_HOST) as settings,
    ):
        folder = Path(name)
        jobs, text = {}, write_text(folder / "text")
        for recovery in ("in-place", "restart"):
            shape = {"schedule": "1f1b", "stages": PER_HOST * args.hosts, "microbatch": 1}
            jobs[recovery] = write_job(
                folder / f"{recovery}.yaml", text, shape, layers=6, steps=STEPS, clip=1.0, checkpoint_every=10,
                max_failures=9, recovery=recovery,
            )  # fmt: skip
        status, undisturbed, said = ended(run_job(members, settings, jobs["restart"], folder / "undisturbed"))
        if status or (what := left(members)):
            print(said if status else f"an undisturbed run leaves {what}", file=sys.stderr)
            return 1
        while (done := sum(len(run.kills) for run in found)) < args.times and len(found) <= args.times:
            victims = [n % args.hosts for n in range(done, min(done + args.hosts, args.times))]
            in_place, directory = len(found) % 2 == 0, folder / f"run-{len(found)}"
            job = jobs["in-place" if in_place else "restart"]
            run = kill_in(members, settings, job, directory, victims, undisturbed["losses"], in_place)
            found.append(run)
            for kill in run.kills:
                when = "opening" if kill.opening else "in a step"
                print(f"host {kill.host}, {when}, left: {', '.join(kill.left) or 'nothing'}")
            print(
                f"run {len(found)}, {job.stem}: status {run.status}, {len(run.kills)} kills, {run.restarts} restarts, "
                f"same losses: {run.same_losses}, left: {', '.join(run.left) or 'nothing'}",
                flush=True,
            )
    kills = [kill for run in found for kill in run.kills]
    bad = sum(not run.sound for run in found)
    write_rows(args.json, [asdict(run) for run in found])
    early = sum(kill.opening for kill in kills)
    print(f"{len(kills)} kills, {early} of them before the first step; {bad} of {len(found)} runs unsound")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
