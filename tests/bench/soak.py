"""Disturb short runs at random for hours: each must end with the losses of an undisturbed one and leave nothing behind.

    python -m tests.bench.soak [--hours H] [--times N] [--each 10] [--every 6] [--steps 3000] [--shape SHAPE ...]
                               [--fault FAULT ...] [--cut 5] [--recovery restart] [--seed 0] [--json FILE]
                               [--keep DIRECTORY]

Three hosts with two devices each, network namespaces of this machine (``tests.hosts``), have a Ray together; it takes
root. Run after run, in turn over the shapes (``parallel_of`` of ``tests.bench.runtime.recoveries``; four devices, so
that a host is spare), until ``--hours`` are over or there were ``--times`` faults. All runs have
``train.copy_every=1``, and ``train.recovery`` is ``--recovery``. After ``--every`` seconds on average, once the run has
gone on since the fault before, comes one of these; a run ends after ``--each`` of them, or after ``--steps`` steps:

    worker      a random worker is killed (SIGKILL)
    driver      the driver is killed
    controller  Ray Train's controller is killed
    raylet      the raylet of a host other than the head is killed; another one starts there
    host        a host other than the head is cut off, and all its processes killed; it comes back after --cut seconds,
                and from then on its kernel answers whoever still waits for them
    pause       a random worker is stopped (SIGSTOP) for up to 3 s
    hang        a random worker is stopped for good: others wait ``message_timeout_s``, 10 s, and it has to be replaced
    link        what a host sends goes at 0.2 to 5 Mb/s for up to 5 s (tc, tbf)
    network     a host other than the head is cut off for up to 12 s; its processes live on
    disk        the disk of the run directory, a tmpfs of its own, is full for 3 s

A run that fails for a full disk, which raises where it writes, is resumed. What must not be there after a run, on any
host: its processes, files in /dev/shm, sockets, placement groups, named actors, unfinished files in its directory.
Prints a line per run and, at the end, for each kind of fault the seconds to the next step, the steps repeated and
where the state came from; with them the seconds in which a fresh interpreter imports what a worker does. Exit status 1
where a run was not sound; its directory is copied to one below ``--keep``.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from raypipe.observe.run_dir import STOP, ask
from tests.bench.command import options, write_rows
from tests.bench.runtime.recoveries import Train, alive, newest, parallel_of, recovered_job
from tests.hosts import Host, environment, hosts, ray_cluster, start_raylet
from tests.job_files import write_text
from tests.runtime.runs.killing import CONTROLLER, DRIVER, events

SHAPES = ("1f1b:2x2", "zb-v:2x2", "chimera:4x1", "1f1b:2x2:zero3", "1f1b:2x1:tensor2", "1f1b:2x2:experts2", "1f1b:4x1")
KILLS = ("worker", "driver", "controller", "raylet", "host")
OF_HOSTS = ("raylet", "host", "network")
"""Faults that a host has, which must be there."""
FAULTS = (*KILLS, "pause", "hang", "link", "network", "disk")
HOSTS, PER_HOST = 3, 2
PAUSE_S, FULL_S, SLOW_S, CUT_S = 3.0, 3.0, 5.0, 12.0
"""Longest pause, how long the disk is full, longest time that a link is slow, or cut: Ray gives nodes up after 18 s."""
LEFT_S, GONE_S, STUCK_S = 30.0, 15.0, 240.0
"""Time that what is left may take to go, workers of a lost raylet, and a run to go on."""
DISK = "64m"
WORKERS = "ray::StageWorker"
RAYS_OWN = ("plasma", "ray", "sem.mp-")
"""Beginnings of the names of Ray's own files in /dev/shm."""
OURS = ("ray::Stage", "ray::Keeper", "ray::CopyIndex", DRIVER, CONTROLLER)
OF_RAY_TRAIN = ["AutoscalingCoordinator", "train_v2_state_actor"]
"""Named actors that Ray Train starts once on a cluster, and that stay as long as it."""
HELD = f"""
import json, ray
from ray.util import list_named_actors, placement_group_table
ray.init(logging_level="ERROR", log_to_driver=False)
groups = [str(one["name"]) for one in placement_group_table().values() if one["state"] != "REMOVED"]
actors = {{str(one["name"]) for one in list_named_actors(all_namespaces=True)}} - {{*{OF_RAY_TRAIN}}}
print(json.dumps([*groups, *actors]))
"""
"""Prints the placement groups and named actors that there are."""


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


def left_on(host: Host) -> list[str]:
    """What no run may leave on a host."""
    names = host.run("ls", "/dev/shm").stdout.split()
    files = [f"/dev/shm/{name}" for name in names if not name.startswith(RAYS_OWN)]
    sockets = Path(f"/proc/{host.pid}/net/unix").read_text().splitlines()
    alive = [title for title in processes(host).values() if title.startswith(("ray::Stage", "ray::RayTrain"))]
    return files + [f"process {title}" for title in alive] + [s.split()[-1] for s in sockets if "@raypipe-" in s]


@dataclass(slots=True)
class Fault:
    """One fault."""

    kind: str
    seconds: float = 0.0
    """From it to the next step done."""
    repeated: int = 0
    """Steps."""
    kept: bool | None = None
    """Whether all workers that it left alive serve on; None where nothing was killed."""
    sources: list[str] = field(default_factory=list)
    """Where each recovery had the state from."""
    phases: dict[str, float] = field(default_factory=dict)
    """The seconds of the last recovery: until the driver ``noticed`` it, all living had ``parted``, replacements had
    ``started``, all had ``joined``; or a ``driver`` followed, and workers were ``set up``; to the ``step``."""


@dataclass(slots=True)
class Run:
    """One disturbed run."""

    shape: str
    faults: list[Fault] = field(default_factory=list)
    resumed: int = 0
    status: int = -1
    steps: int = 0
    wrong: list[str] = field(default_factory=list)
    """Why it is not sound."""

    def __str__(self) -> str:
        faults = ", ".join(f"{one.kind} {one.seconds:.1f} s" for one in self.faults)
        resumed = f", {self.resumed} times resumed" if self.resumed else ""
        return f"{self.shape}, {self.steps} steps: {faults}{resumed}: {'; '.join(self.wrong) or 'sound'}"


class Cluster:
    """The hosts and the Ray over them; the first one, on which runs are started, is never lost."""

    def __init__(self, members: list[Host], settings: dict[str, str], cut_s: float = 5.0) -> None:
        self.members, self.settings, self.cut_s = members, settings, cut_s
        self.wrong: list[str] = []
        """What was found while a host came back."""
        self._back = Thread()

    def train(self, job: Path, directory: Path, *extra: str) -> Train:
        """Start a run."""
        return Train(job, directory, *extra, on=self.members[0].command(), env=environment(**self.settings))

    def titled(self, *beginnings: str, without: Host | None = None) -> list[int]:
        """Return the processes whose titles begin so, oldest first, of all hosts but one."""
        found = [processes(host) for host in self.members if host is not without]
        return sorted(pid for of_host in found for pid, title in of_host.items() if title.startswith(beginnings))

    def lose(self, kind: str) -> Host | None:
        """Lose a host that has workers, or only its raylet, and have it come back; return it, if there is one."""
        busy = [host for host in self.members[1:] if any(t.startswith(WORKERS) for t in processes(host).values())]
        if not busy:
            return None
        host = random.choice(busy)
        if kind == "raylet":
            (raylet,) = (pid for pid, title in processes(host).items() if title.split(" ")[0].endswith("/raylet"))
            os.kill(raylet, signal.SIGKILL)
        else:
            host.must("ip", "link", "set", "eth0", "down")
            _kill_all(host)
        self._back = Thread(target=self._come_back, args=(host, kind))
        self._back.start()
        return host

    def _come_back(self, host: Host, kind: str) -> None:
        deadline = time.monotonic() + GONE_S
        if kind == "host":
            time.sleep(self.cut_s)
        while kind == "raylet" and (left := [t for t in processes(host).values() if t.startswith(OURS)]):
            if time.monotonic() > deadline:
                self.wrong.append(f"{host.address} without its raylet still has {', '.join(left)}")
                break
            time.sleep(0.2)
        _kill_all(host)
        host.must("ip", "link", "set", "eth0", "up")
        why = start_raylet(host, self.settings, PER_HOST)
        if why and (why := start_raylet(host, self.settings, PER_HOST)):  # the machine may be busy
            self.wrong.append(f"{host.address} has no raylet: {why[-300:]}")

    def wait(self) -> None:
        """Wait until all hosts are there."""
        if self._back.ident is not None:
            self._back.join()

    def slow(self) -> None:
        """Have a random host send little for a while."""
        host, rate = random.choice(self.members), f"{random.uniform(0.2, 5.0):.2f}mbit"
        device = ["qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms"]
        host.must("tc", *device)
        time.sleep(random.uniform(1.0, SLOW_S))
        host.must("tc", "qdisc", "del", "dev", "eth0", "root")

    def part(self) -> None:
        """Have a random host that is not the head hear and say nothing for a while."""
        host = random.choice(self.members[1:])
        host.must("ip", "link", "set", "eth0", "down")
        time.sleep(random.uniform(1.0, CUT_S))
        host.must("ip", "link", "set", "eth0", "up")

    def left(self, directory: Path) -> list[str]:
        """Return what a run has left behind, once that had time to go."""
        self.wait()
        deadline = time.monotonic() + LEFT_S
        while True:
            result = [f"{host.address}: {what}" for host in self.members for what in left_on(host)]
            result += [f"process {pid}" for pid in self.titled(*OURS)]
            result += [str(path) for path in directory.rglob("*") if path.suffix in (".partial", ".tmp")]
            result += [] if result else self._held()
            if not result or time.monotonic() > deadline:
                return result
            time.sleep(0.5)

    def _held(self) -> list[str]:
        done = self.members[0].run(sys.executable, "-c", HELD, **self.settings)
        return list(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else [done.stderr[-300:]]


def _kill_all(host: Host) -> None:
    """Kill all processes of a host but the two that hold it."""
    for pid, title in processes(host).items():
        if pid != host.pid and title != "cat":
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


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


def happen(kind: str, cluster: Cluster, directory: Path) -> list[int] | None:
    """Have a fault happen; return the workers that should live on, None if there is nothing it could happen to."""
    workers = cluster.titled(WORKERS)
    try:
        if kind == "disk":
            fill(directory.parent)
        elif kind == "link":
            cluster.slow()
        elif kind == "network":
            cluster.part()
        elif kind in ("raylet", "host"):
            lost = cluster.lose(kind)
            return None if lost is None else [pid for pid in cluster.titled(WORKERS, without=lost) if pid in workers]
        elif kind in ("driver", "controller"):
            os.kill(cluster.titled(DRIVER if kind == "driver" else CONTROLLER)[0], signal.SIGKILL)
        elif kind == "worker":
            os.kill(victim := random.choice(workers), signal.SIGKILL)
            workers.remove(victim)
        else:
            stop(workers, random.uniform(0.1, PAUSE_S) if kind == "pause" else None)
    except (ProcessLookupError, IndexError):
        return None
    return workers


def recoveries(directory: Path) -> list[dict[str, Any]]:
    """Return the recoveries of a run so far."""
    return [*events(directory, "recovered"), *events(directory, "restarted")]


def phases(directory: Path, at: float, until: float) -> dict[str, float]:
    """Return where the seconds of the last recovery between two times went; see Fault."""
    found = [one for one in recoveries(directory) if at < one["time"] < until]
    if not found:
        return {}
    last = max(found, key=lambda one: float(one["time"]))
    if last["event"] == "recovered":
        result = {"noticed": last["time"] - last["seconds"] - at, **last["phases_s"]}
    else:
        began = [one["time"] for one in events(directory, "started") if one["time"] >= last["time"]]
        result = {"driver": last["time"] - at, **({"set up": began[0] - last["time"]} if began else {})}
    return {**result, "step": until - at - sum(result.values())}


def strike(kind: str, cluster: Cluster, process: Train, directory: Path) -> Fault | None:
    """Have a fault happen and wait for the next step; None if there is nothing it could happen to."""
    if kind in OF_HOSTS:
        cluster.wait()
    known, step, began, at = recoveries(directory), newest(directory), time.monotonic(), time.time()
    living = happen(kind, cluster, directory)
    if living is None:
        return None
    fault, seen = Fault(kind), len(known)
    while process.poll() is None and time.monotonic() < began + STUCK_S:
        found = recoveries(directory)
        if len(found) > seen:  # the steps since then may be repeated
            seen, step = len(found), newest(directory)
        if newest(directory) > step and (seen > len(known) or kind not in (*KILLS, "hang")):
            break
        time.sleep(0.02)
    fault.seconds = time.monotonic() - began
    new = [one for one in recoveries(directory) if one not in known]
    fault.repeated, fault.sources = sum(one["steps_repeated"] for one in new), [one["source"] for one in new]
    if kind in KILLS:
        fault.kept = all(alive(pid) for pid in living)
    fault.phases = phases(directory, at, time.time())
    return fault


class Jobs:
    """The job of each shape, and the losses that it has undisturbed."""

    def __init__(self, cluster: Cluster, folder: Path, **train: Any) -> None:
        self._cluster, self._folder, self._train, self._text = cluster, folder, train, write_text(folder / "text")
        self._losses: dict[str, list[float]] = {}

    def job(self, shape: str) -> Path:
        """Return the file of a job."""
        path = self._folder / f"{shape.replace(':', '-')}.yaml"
        more = {"clip": 1.0, "message_timeout_s": 10.0, "max_failures": 200, **self._train}
        return path if path.exists() else recovered_job(path, self._text, parallel_of(shape), **more)

    def losses(self, shape: str, steps: int) -> list[float]:
        """Return the losses of at least so many steps."""
        known = self._losses.get(shape, [])
        if len(known) < steps:
            directory, more = self._folder / f"undisturbed-{time.monotonic_ns()}", f"train.steps={int(1.5 * steps)}"
            status, result, said = self._cluster.train(self.job(shape), directory, "--set", more).ended()
            if status:
                raise SystemExit(f"{shape} does not run undisturbed: {said}")
            known = self._losses[shape] = result["losses"]
        return known


def disturb(
    cluster: Cluster, jobs: Jobs, shape: str, directory: Path, kinds: list[str], most: int, every: float
) -> Run:
    """Run a job under up to ``most`` faults, and end it then."""
    copies = ("--set", "train.copy_every=1")
    job, run = jobs.job(shape), Run(shape)
    process = cluster.train(job, directory, *copies)
    due = time.monotonic()
    while True:
        while process.poll() is None and len(run.faults) < most:
            time.sleep(0.05)
            if time.monotonic() < due or newest(directory) < 3:
                continue
            if (fault := strike(random.choice(kinds), cluster, process, directory)) is None:
                continue
            run.faults.append(fault)
            if fault.seconds > STUCK_S and process.poll() is None:
                run.wrong.append(f"no step within {STUCK_S:g} s of: {fault.kind}")
                most = 0
            due = time.monotonic() + random.uniform(0.5, 1.5) * every
        if process.poll() is None:
            ask(directory, STOP, "enough")
        run.status, result, said = process.ended()
        if run.status == 0 or run.resumed >= sum(fault.kind == "disk" for fault in run.faults):
            break
        run.resumed += 1
        process = cluster.train(job, directory, "--resume", *copies)
    found = result.get("losses", [])
    run.steps = len(found)
    if leaves := cluster.left(directory):
        run.wrong.append(f"left behind: {', '.join(leaves)}")
    losses = jobs.losses(shape, run.steps)
    if run.status:
        run.wrong.append(f"status {run.status}: {said.strip()[-1000:]}")
    elif found != losses[: len(found)] or len(run.faults) > len(found):
        apart = [step for step, (one, other) in enumerate(zip(found, losses, strict=False), 1) if one != other]
        run.wrong.append(
            f"the losses of {len(apart)} of {len(found)} steps differ, the first of {min(apart, default=-1)}"
        )
    saved = max((row["step"] for row in events(directory, "checkpoint")), default=0)
    if run.status == 0 and saved > len(found):
        run.wrong.append(f"{saved} steps are in the last checkpoint, and {len(found)} in the log")
    run.wrong += cluster.wrong
    cluster.wrong.clear()
    return run


def on_tmpfs(path: Path) -> bool:
    """Make a folder a small file system of its own; return whether that was possible."""
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(path)], capture_output=True)
    return mounted.returncode == 0


def import_s() -> float:
    """Return the seconds that a fresh interpreter takes to import what a worker does, with torch."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import raypipe.runtime.worker.worker"], check=True)
    return time.monotonic() - began


def figures(found: list[Run]) -> str:
    """Return what became of each kind of fault."""
    by_kind: dict[str, list[Fault]] = defaultdict(list)
    for run in found:
        for fault in run.faults:
            by_kind[fault.kind].append(fault)
    lines = []
    for kind, faults in sorted(by_kind.items()):
        seconds = [one.seconds for one in faults]
        kept = [one.kept for one in faults if one.kept is not None]
        lines.append(
            f"{kind:10s} {len(faults):4d} times, next step after {statistics.median(seconds):5.1f} s (median), most "
            f"{max(seconds):5.1f} s; steps repeated {dict(sorted(Counter(one.repeated for one in faults).items()))}; "
            f"from {dict(Counter(source for one in faults for source in one.sources))}"
            + (f"; the others lived on {sum(kept)} times" if kept else "")
        )
        for ways in sorted({tuple(one.phases) for one in faults if one.phases}):
            here = [one.phases for one in faults if tuple(one.phases) == ways]
            parts = ", ".join(f"{name} {statistics.median(one[name] for one in here):.1f}" for name in ways)
            lines.append(f"           of {len(here)}, medians: {parts}")
    return "\n".join(lines)


def _end(number: int, _frame: Any) -> None:
    """End in order on SIGTERM, as ``timeout`` sends it: the disk is unmounted, and the hosts end."""
    raise SystemExit(128 + number)


def main() -> int:
    """Print a line per run, then all figures; exit status 1 where a run was not sound."""
    given = {"shape": SHAPES, "fault": FAULTS, "recovery": "in-place", "seed": 0, "json": Path, "keep": Path}
    args = options(__doc__, hours=0.0, times=0, each=10, every=6.0, cut=5.0, steps=3000, **given)
    random.seed(args.seed)
    signal.signal(signal.SIGTERM, _end)
    began = time.monotonic()
    found: list[Run] = []
    imports = [import_s()]

    def goes_on() -> bool:
        done = sum(len(run.faults) for run in found)
        hours = (time.monotonic() - began) / 3600
        return (done < args.times or not args.times) and hours < (args.hours or 1e9) and bool(args.times or args.hours)

    with tempfile.TemporaryDirectory(prefix="raypipe-soak-") as name:
        folder, disk = Path(name), Path(name) / "disk"
        mounted = on_tmpfs(disk)  # before the hosts, which would not see it
        try:
            with hosts(HOSTS) as members, ray_cluster(members, PER_HOST, forks=False) as settings:
                cluster = Cluster(members, settings, args.cut)
                jobs = Jobs(cluster, folder, steps=args.steps, recovery=args.recovery)
                while goes_on() or not found:
                    shape = args.shape[len(found) % len(args.shape)]
                    directory = disk / f"run-{len(found)}"
                    found.append(disturb(cluster, jobs, shape, directory, args.fault, args.each, args.every))
                    imports.append(import_s())
                    print(found[-1], flush=True)
                    write_rows(args.json, [asdict(run) for run in found])
                    if found[-1].wrong and args.keep is not None:
                        shutil.copytree(directory, args.keep / directory.name)
                    shutil.rmtree(directory)  # a small disk
        finally:
            if mounted:
                subprocess.run(["umount", "-l", str(disk)], check=True)
    print(figures(found))
    bad, faults = [run for run in found if run.wrong], sum(len(run.faults) for run in found)
    print(f"a fresh interpreter imports what a worker does in {statistics.median(imports):.1f} s (median)")
    print(f"{len(found)} runs, {faults} faults, {len(bad)} runs not sound, {(time.monotonic() - began) / 60:.0f} min")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
