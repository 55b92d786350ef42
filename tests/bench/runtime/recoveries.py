"""Kill workers at random moments in the middle of runs, and see how they are replaced while all others go on.

    python -m tests.bench.runtime.recoveries [--kills 8] [--runs 1] [--standby 1] [--shape 1f1b:2x2:zero3] [--json FILE]

Every shape (``parallel_of``) trains undisturbed once and then ``--runs`` times with ``--kills`` kills
(SIGKILL) of a random worker each. Where its stages have twins (replicas, Chimera), these give a replacement their
state, and at most one step is repeated (zb: or two); else the run has ``train.copy_every=1`` and all go on from the
copies, with at most one step repeated that had ended. A run is sound if its losses are those of the undisturbed one,
bit for bit, and all processes but the killed ones lived on.
With ``--told`` a worker gets a SIGTERM instead: it goes between two steps, and none may be repeated.
With ``--standby`` a kill waits until the processes that stand by are ready, which have low priority on busy cores.
Prints the seconds from each kill to the next step done, and the steps repeated; ``--restart KILLS`` measures the same
with ``train.recovery=restart`` beside it. Exit status 1 if a run was not sound.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util import list_named_actors

from tests.bench.command import options, write_rows
from tests.experts.families import FAMILIES
from tests.job_files import write_job, write_text
from tests.ray_environment import start_ray
from tests.runtime.runs.killing import events, rows

SHAPES = (
    "1f1b:2x2", "zb-v:2x2", "chimera:4x1", "chimera:2x2", "1f1b:2x1", "zb-v:2x1", "1f1b:4x1", "1f1b:2x2:zero3",
)  # fmt: skip
RUN_S = 1200.0


def parallel_of(shape: str) -> dict[str, Any]:
    """Return what SCHEDULE:STAGESxREPLICAS[:MORE] asks for; MORE is a way to shard, ``tensor2`` or ``experts2``.

    >>> parallel_of("1f1b:2x2:experts2")
    {'schedule': '1f1b', 'stages': 2, 'replicas': 2, 'experts': 2}
    """
    schedule, size, more = [*shape.split(":"), ""][:3]
    stages, replicas = map(int, size.split("x"))
    key = more.rstrip("0123456789")
    asked = {key: int(more.removeprefix(key))} if key in ("tensor", "experts") else {"shard": more or "none"}
    return {"schedule": schedule, "stages": stages, "replicas": replicas, **asked}


def has_twins(shape: str) -> bool:
    """Return whether every stage, with its experts, is on two devices."""
    size, *more = shape.split(":")[1:]
    return not more and (shape.startswith("chimera") or not size.endswith("x1"))


def recovered_job(path: Path, text: Path, shape: dict[str, Any], **train: Any) -> Path:
    """Write the job of a shape."""
    often = {"eval_every": 40, "eval_batches": 1, "checkpoint_every": 60, "message_timeout_s": 60.0, "max_failures": 20}
    write_job(path, text, {"microbatch": 1, **shape}, layers=4, hidden=16, **{**often, **train})
    if "experts" in shape:
        model = {"hf": "mixtral", "config": FAMILIES["mixtral"], "sequence": 16}
        path.write_text(json.dumps({**json.loads(path.read_text()), "model": model}))
    return path


class Train:
    """``raypipe train``, whose output goes to files: nobody reads it meanwhile, and a full pipe would hold it up.

    ``on``: words that run it elsewhere, in the environment ``env``.
    """

    def __init__(
        self, job: Path, directory: Path, *extra: str, on: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        words = [*on, sys.executable, "-m", "raypipe", "train", str(job), "--run-dir", str(directory), "--json", *extra]
        self._out, self._said = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115 - until the run ends
        self._process = subprocess.Popen(words, stdout=self._out, stderr=self._said, env=env, start_new_session=True)

    def poll(self) -> int | None:
        """Return its exit status; None while it runs."""
        return self._process.poll()

    def ended(self, timeout_s: float = RUN_S) -> tuple[int, dict[str, Any], str]:
        """Return exit status, result and errors, when it ends; it is killed after ``timeout_s``."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        out, said = (file.seek(0) or file.read() for file in (self._out, self._said))
        return self._process.returncode, json.loads(out.splitlines()[0]) if self.poll() == 0 else {}, said


@dataclass(slots=True)
class Run:
    shape: str
    told: bool = False
    status: int = -1
    same_losses: bool = False
    same_processes: bool = True
    seconds: list[float] = field(default_factory=list)
    """From each kill to the next step done."""
    repeated: list[int] = field(default_factory=list)
    in_place: int = 0
    restarts: int = 0
    from_copies: int = 0

    @property
    def twins(self) -> bool:
        return has_twins(self.shape)

    @property
    def sound(self) -> bool:
        kills = len(self.seconds)
        as_wanted = (self.in_place, self.restarts) == (kills, 0) and self.same_processes
        # A device whose update can be taken back may begin the next step before the others know of this one.
        most = 0 if self.told else 2 if self.shape.startswith("zb") or not self.twins else 1
        few = max(self.repeated, default=0) <= most
        return self.status == 0 and self.same_losses and as_wanted and few


def pids_of(directory: Path) -> list[int]:
    """The workers' processes now, as the run's events tell them."""
    by_name: dict[str, int] = {}
    for event in rows(directory / "events.jsonl"):
        if event["event"] == "started":
            by_name = {device["name"]: device["pid"] for device in event["devices"]}
        elif event["event"] == "recovered":
            by_name |= dict(zip(event["devices"], event["pids"], strict=True))
    return list(by_name.values())


def attempts(directory: Path) -> int:
    return len(events(directory, "started")) + len(events(directory, "recovered"))


def alive(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def wait_for_standby() -> None:
    """Wait until the newest of the processes that stand by has done what is slow for the first time."""
    named = [one for one in list_named_actors(all_namespaces=True) if one["name"].startswith("standby ")]
    if named:
        last = max(named, key=lambda one: int(one["name"].split()[1]))
        with suppress(ray.exceptions.RayActorError):  # the run has ended
            ray.get(ray.get_actor(last["name"], last["namespace"]).warm.remote(), timeout=RUN_S)


def newest(directory: Path) -> int:
    return max((row["step"] for row in rows(directory / "metrics.jsonl") if "loss" in row), default=0)


def killing(
    shape: str, job: Path, directory: Path, kills: int, losses: list[float], *extra: str, told: bool = False
) -> Run:
    run = Run(shape, told=told)
    process = Train(job, directory, *extra)
    seen = 0
    while len(run.seconds) < kills and process.poll() is None:
        if attempts(directory) <= seen or newest(directory) < 3:
            time.sleep(0.02)
            continue
        seen = attempts(directory)
        before = newest(directory)
        while newest(directory) < before + 2 and process.poll() is None:
            time.sleep(0.01)
        wait_for_standby()
        time.sleep(random.uniform(0.0, 1.5))
        if process.poll() is not None:
            break
        members = pids_of(directory)
        victim = random.choice(members)
        began = time.monotonic()
        try:
            os.kill(victim, signal.SIGTERM if told else signal.SIGKILL)
        except ProcessLookupError:
            break
        while attempts(directory) <= seen and process.poll() is None:
            time.sleep(0.01)
        step = newest(directory)
        while newest(directory) <= step and process.poll() is None:
            time.sleep(0.01)
        run.seconds.append(time.monotonic() - began)
        if "train.recovery=restart" not in extra and process.poll() is None:
            run.same_processes &= all(alive(pid) for pid in members if pid != victim)
    run.status, result, said = process.ended()
    if run.status:
        print(said[-3000:], file=sys.stderr)
    run.same_losses = result.get("losses") == losses
    both = zip(result.get("losses", ()), losses, strict=False)
    apart = [step for step, (one, other) in enumerate(both, 1) if one != other]
    if apart:
        print(f"{shape}: the losses of {len(apart)} steps differ, the first of step {apart[0]}", file=sys.stderr)
    run.in_place, run.restarts = len(events(directory, "recovered")), len(events(directory, "restarted"))
    run.from_copies = sum(event["source"] == "neighbour" for event in events(directory, "recovered"))
    again = [*events(directory, "recovered"), *events(directory, "restarted")]
    run.repeated = [event["steps_repeated"] for event in again]
    return run


def said_of(what: str, seconds: list[float]) -> str:
    if not seconds:
        return f"{what}: no kills"
    middle = statistics.median(seconds)
    return f"{what}: {len(seconds)} kills, next step after {middle:.2f} s (median), most {max(seconds):.2f} s"


def main() -> int:
    args = options(
        __doc__, kills=8, runs=1, steps=1500, standby=0, shape=SHAPES, clip="1.0", restart=0, seed=0, compiled=False,
        told=False,
        json=Path, keep=Path,
    )  # fmt: skip
    random.seed(args.seed)
    os.environ["RAY_ADDRESS"] = start_ray(8, forks=False)
    found: list[Run] = []
    restarted: list[float] = []
    with tempfile.TemporaryDirectory(prefix="raypipe-recover-") as name:
        folder = args.keep or Path(name)
        folder.mkdir(exist_ok=True)
        text = write_text(folder / "text")
        for shape in args.shape:
            begin = folder / shape.replace(":", "-")
            clip = None if args.clip == "null" else float(args.clip)
            job = recovered_job(begin.with_suffix(".yaml"), text, parallel_of(shape), steps=args.steps, clip=clip)
            compiled = ("--set", "train.compile=inductor", "--set", "train.compile_first=true") if args.compiled else ()
            status, undisturbed, said = Train(job, begin, *compiled).ended()
            if status:
                print(said, file=sys.stderr)
                return 1
            for number in range(args.runs):
                copies = () if has_twins(shape) else ("--set", "train.copy_every=1")
                extra = ("--set", f"train.standby={args.standby}", *copies, *compiled)
                directory = folder / f"{begin.name}-{number}"
                run = killing(shape, job, directory, args.kills, undisturbed["losses"], *extra, told=args.told)
                found.append(run)
                print(
                    f"{shape} {number + 1}: status {run.status}, {len(run.seconds)} kills, {run.in_place} in place "
                    f"({run.from_copies} from copies), {run.restarts} restarts, same losses: {run.same_losses}, "
                    f"same processes: {run.same_processes}, "
                    f"repeated {sum(run.repeated)}, seconds {[round(s, 2) for s in run.seconds]}",
                    flush=True,
                )
            if args.restart:
                extra = ("--set", "train.recovery=restart", *compiled)
                run = killing(shape, job, folder / f"{begin.name}-restart", args.restart, undisturbed["losses"], *extra)
                restarted += run.seconds
                print(f"{shape}, restarted: status {run.status}, same losses: {run.same_losses}", flush=True)
    bad = sum(not run.sound for run in found)
    for twins, what in ((True, "replaced in place"), (False, "replaced from copies")):
        seconds = [second for run in found for second in run.seconds if run.twins is twins]
        if seconds:
            print(said_of(what, seconds))
        repeated = [count for run in found for count in run.repeated if run.twins is twins]
        if repeated:
            print(f"{sum(repeated)} steps repeated, most {max(repeated)} after one kill")
    if args.restart:
        print(said_of("restarted", restarted))
    print(f"{bad} of {len(found)} runs unsound")
    write_rows(args.json, [asdict(run) for run in found])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
