"""Slow one of four devices down while it trains, and let it recover: ``python -m tests.bench.runtime.stragglers``.

A model whose layers take a given time without computing (so that four devices run at their true proportions on two
cores) trains over four stages with ``train.elastic``. Then one device's layers take ``--slowdown`` times as long, and
later their own time again. Prints after how many steps the device is named, the step before, slowed down and with the
plan for the devices as they are then, and that plan's step beside the best that the planner predicts for such devices,
whichever of the four is slow, or for three without it. Exit status 1 where the device is not named within 20 steps, the
step stays more than 10 % above that, another device is named, or losses are not those of an undisturbed run to 1e-9.

The run's profile is replaced by what the layers are to take, of which a profile counts the processor time alone;
``--as-measured`` leaves it, for a plan that is not quite for these layers. A layer takes longer than its nap, so the
best is predicted from what the tasks of the last step took.

``--quiet SECONDS`` has processes compute for as long in each of four cases, 2 to 8 of them, short steps and long ones,
and counts those that are named: none should be, whatever else uses the cores.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from raypipe.cost.profile import LayerProfile, Profile, load_profile
from raypipe.files import write_whole
from raypipe.job.spec import JobSpec, load_job
from raypipe.observe.run_dir import PROFILE
from raypipe.plan.choose import choose
from raypipe.plan.online.measured_steps import StepClock
from raypipe.plan.online.stragglers import Stragglers, at_speeds
from raypipe.plan.plan import load_plan
from raypipe.schedule import Shape, generate
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import COMPUTE
from raypipe.schedule.lowering.asynchronous import WHOLE
from raypipe.schedule.passes import add_updates
from tests.bench.command import options, write_rows
from tests.ray_environment import start_ray
from tests.runtime.runs.killing import events, rows

LAYERS, SECONDS, WIDTH = 14, 0.012, 8
NAMED_WITHIN, NEAR, LOSS_LIMIT = 20, 1.1, 1e-9
RUN_S = 200.0


@torch.library.custom_op("raypipe_bench::nap", mutates_args=())
def nap(rows: torch.Tensor, seconds: float, folder: str) -> torch.Tensor:
    """Take ``seconds`` a row, times what a file of the folder says that is named after this process."""
    try:
        factor = float((Path(folder) / str(os.getpid())).read_text() or 1.0)
    except (FileNotFoundError, ValueError):
        factor = 1.0
    time.sleep(seconds * factor * len(rows))
    return rows.clone()


@nap.register_fake
def _(rows: torch.Tensor, seconds: float, folder: str) -> torch.Tensor:
    return torch.empty_like(rows)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.seconds, ctx.folder = inputs


def _back(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return nap(grad, 2 * ctx.seconds, ctx.folder), None, None


nap.register_autograd(_back, setup_context=_keep)


class Napping(torch.nn.Module):
    """A product and a nap."""

    def __init__(self, seconds: float, folder: str, width: int) -> None:
        super().__init__()
        self.linear, self.seconds, self.folder = torch.nn.Linear(width, width), seconds, folder

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.tanh(nap(self.linear(rows), self.seconds, self.folder))


def napping(layers: int, seconds: float, folder: str, width: int = WIDTH) -> torch.nn.Module:
    """A model of such layers."""
    return torch.nn.Sequential(*(Napping(seconds, folder, width) for _ in range(layers)), torch.nn.Linear(width, 3))


def napping_job(folder: Path, steps: int, slow: Path) -> Path:
    """Write the job and its data."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 64)
    np.savez(folder / "rows.npz", features=draw.normal(size=(64, WIDTH)) + labels[:, None], labels=labels)
    slow.mkdir()
    model = {
        "import": "tests.bench.runtime.stragglers:napping",
        "args": {"layers": LAYERS, "seconds": SECONDS, "folder": str(slow)},
    }
    job = {
        "name": "stragglers", "model": model, "data": {"type": "arrays", "path": str(folder / "rows.npz")},
        "train": {
            "steps": steps, "batch": 8, "lr": 0.01, "seed": 0, "dtype": "float64", "eval_batches": 1,
            "elastic": {"min_devices": 4, "max_devices": 4},
        },
        "parallel": {"auto": True, "replicas": 1, "microbatch": 1},
    }  # fmt: skip
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder / "job.yaml"


class Run:
    """A run of the command."""

    def __init__(self, job: Path, directory: Path, *extra: str) -> None:
        self.directory = directory
        words = ["-m", "raypipe", "train", str(job), "--run-dir", str(directory), "--json", *extra]
        self.process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=dict(os.environ), start_new_session=True,
        )  # fmt: skip

    def steps(self) -> list[dict[str, Any]]:
        """Rows of steps."""
        return [row for row in rows(self.directory / "metrics.jsonl") if "loss" in row]

    def wait(self, until: Callable[[], bool]) -> bool:
        """Wait until something holds; return whether it does."""
        deadline = time.monotonic() + RUN_S
        while not until():
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def result(self) -> dict[str, Any]:
        """Wait for the end and return what the command says; exit where it failed."""
        out, said = self.process.communicate(timeout=RUN_S)
        if self.process.returncode:
            raise SystemExit(said[-3000:])
        return dict(json.loads(out))

    def step_s(self, first: int, last: int | None = None) -> float:
        """Median seconds of the steps from ``first`` on."""
        return median(row["step_s"] for row in self.steps()[first:last])


def as_they_nap(profile: Profile, there_s: float = SECONDS, back_s: float = 2 * SECONDS) -> Profile:
    """A profile with what layers take each way: one counts processor time, of which naps take none."""

    def one(layer: LayerProfile, there: float, back: float) -> LayerProfile:
        times = {
            n: own.model_copy(update={"forward": n * there, "input_grad": n * back, "weight_grad": 1e-5,
                                      "joint": n * back + 1e-5, "recompute": n * there})
            for n, own in layer.times.items()
        }  # fmt: skip
        return layer.model_copy(update={"times": times})

    naps, head = (there_s, back_s), (1e-5, 2e-5)
    layers = [one(layer, *(naps if k < LAYERS else head)) for k, layer in enumerate(profile.layers)]
    return profile.model_copy(update={"layers": tuple(layers), "alone": 1.0})


def seconds_a_layer(directory: Path) -> tuple[float, float]:
    """What a layer took forward and backward in the last step of a run, by the medians of its tasks."""
    cut = load_plan(directory / "plan.json").cut
    taken: dict[str, list[float]] = {"F": [], "B": []}
    for spans in json.loads((directory / "timeline.json").read_text())["measured"]["spans"]:
        for span in spans:
            stage, kind = re.match(r"(\d+)\D*?(F|BW?|\D)", span["task"]).groups()  # type: ignore[union-attr]
            naps = sum(layer < LAYERS for layer in cut[int(stage)])
            if naps and kind[0] in taken:
                taken[kind[0]].append((span["end"] - span["start"]) / naps)
    return median(taken["F"]), median(taken["B"])


def slow_device(folder: Path, slowdown: float, device: int, warm: int, as_measured: bool) -> dict[str, Any]:
    """Slow a device down and let it recover; return what was measured."""
    slow = folder / "slow"
    job = napping_job(folder, 100_000, slow)
    run = Run(job, folder / "run")
    result: dict[str, Any] = {"device": device, "slowdown": slowdown}

    def changed(number: int) -> bool:
        """Whether the run has made 15 steps with its ``number``-th plan since it began."""
        begun = events(run.directory, "started")
        return len(begun) > number and len(run.steps()) >= begun[number]["resumed_from"] + 15

    def named(number: int) -> bool:
        return len(events(run.directory, "straggler")) >= number

    try:
        if not run.wait(lambda: len(run.steps()) >= warm):
            run.result()
        profile = as_they_nap(load_profile(run.directory / PROFILE))
        if not as_measured:
            write_whole(run.directory / PROFILE, profile.model_dump_json())
        pid = events(run.directory, "started")[-1]["devices"][device]["pid"]
        result["before_s"] = run.step_s(5)
        at = len(run.steps())
        (slow / str(pid)).write_text(str(slowdown))
        run.wait(lambda: named(1))
        first = events(run.directory, "straggler")[0]
        result |= {"named": first["device"], "as": first["slowdown"], "after_steps": len(run.steps()) - at}
        run.wait(lambda: bool(events(run.directory, "paused")))
        result["slow_s"] = run.step_s(at + 2)
        run.wait(lambda: changed(1))
        result["planned_s"] = load_plan(run.directory / "plan.json").predicted_step_s
        result["adapted_s"] = run.step_s(events(run.directory, "started")[1]["resumed_from"] + 2)
        at = len(run.steps())
        (slow / str(pid)).unlink()
        run.wait(lambda: len(events(run.directory, "straggler")) > 1)
        result["back_after_steps"] = len(run.steps()) - at
        run.wait(lambda: changed(2))
        result["recovered_s"] = run.step_s(events(run.directory, "started")[2]["resumed_from"] + 2)
        (run.directory / "stop").write_text("enough")
        ended = run.result()
    finally:
        if run.process.poll() is None:
            run.process.kill()
    print(json.dumps(result), flush=True)
    result["names"] = [(e["step"], e["device"], round(e["slowdown"], 2)) for e in events(run.directory, "straggler")]
    result["repeated"] = [one["steps_repeated"] for one in ended["recovery"]]
    plain = undisturbed_losses(load_job(job), run.directory / "data", len(ended["losses"]))
    result["off"] = max(abs(a - b) for a, b in zip(ended["losses"], plain, strict=True))
    result["layer_s"] = seconds_a_layer(run.directory)
    profile = as_they_nap(profile, *result["layer_s"])
    known, speeds = load_job(job), [tuple(slowdown if d == at else 1.0 for d in range(4)) for at in range(4)]
    best = [choose(known, at_speeds(profile, one), len(one)).best.step_s for one in (*speeds, (1.0,) * 3)]
    result["best_s"] = min(best)
    return result


def undisturbed_losses(job: JobSpec, data: Path, steps: int) -> list[float]:
    """The losses of a plain loop in this process, where nothing naps."""
    from tests.runtime.runs.eager_reference import eager_training

    model = job.model.model_copy(update={"args": {**job.model.args, "seconds": 0.0}})  # type: ignore[union-attr]
    train = job.train.model_copy(update={"steps": steps, "elastic": None})
    return eager_training(job.model_copy(update={"model": model, "train": train}), data, _loss)[0]


def _loss(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(module(batch["features"]), batch["labels"])


def compute(rank: int, schedule: Schedule, size: int, together: Any, results: Any) -> None:
    """Make the products of one device's tasks, step after step, each beginning when all have ended the one before."""
    matrix = torch.rand(size, size)
    while True:
        together.wait()
        times = []
        for task in schedule.orders[rank]:
            began = time.monotonic()
            if task.kind in COMPUTE:
                for _ in range(10 if task.kind == "F" else 20):
                    matrix @ matrix
            times.append((began, time.monotonic()))
        results.put((rank, np.array(times)))


def quiet(devices: int, size: int, steps: int, most_s: float) -> dict[str, Any]:
    """Count the devices that are named where all compute, undisturbed but for whatever uses the cores."""
    schedule = add_updates(generate("1f1b", Shape(devices=devices, microbatches=8)))
    context = multiprocessing.get_context("spawn")
    together, results = context.Barrier(devices), context.Queue()
    given = (schedule, size, together, results)
    processes = [context.Process(target=compute, args=(rank, *given), daemon=True) for rank in range(devices)]
    watch, clock, names, done = Stragglers(), StepClock(schedule), list[tuple[int, int, float]](), 0
    for process in processes:
        process.start()
    waiting: list[deque[Any]] = [deque() for _ in processes]
    begun = 0.0
    while done < steps and (done == 0 or time.monotonic() - begun < most_s):
        rank, times = results.get()
        waiting[rank].append(times)
        if not all(waiting):
            continue
        begun, done = begun or time.monotonic(), done + 1
        clock.add(WHOLE, [of_rank.popleft() for of_rank in waiting], number=done)
        names += [(done, e.fields["device"], round(e.fields["slowdown"], 2)) for e in watch.observe(clock)]
    for process in processes:
        process.kill()
    step_s = (time.monotonic() - begun) / done
    return {"devices": devices, "steps": done, "step_s": step_s, "load": os.getloadavg()[0], "named": names}


def main() -> int:
    """Print what was measured; exit status 1 beyond a limit."""
    args = options(__doc__, slowdown="2.0", device=2, warm=25, quiet=0.0, as_measured=False, keep=Path, json=Path)
    if args.quiet:
        found = []
        for devices, size in ((2, 96), (4, 48), (4, 160), (8, 96)):
            found.append(quiet(devices, size, 4000, args.quiet))
            print(json.dumps(found[-1]), flush=True)
        write_rows(args.json, found)
        return int(any(one["named"] for one in found))
    os.environ["RAY_ADDRESS"] = start_ray(4)
    with tempfile.TemporaryDirectory(prefix="raypipe-slow-") as name:
        folder = args.keep or Path(name)
        folder.mkdir(exist_ok=True)
        result = slow_device(folder, float(args.slowdown), args.device, args.warm, args.as_measured)
    print(json.dumps(result))
    write_rows(args.json, [result])
    good = result["named"] == args.device and result["after_steps"] <= NAMED_WITHIN and result["off"] <= LOSS_LIMIT
    return 0 if good and result["adapted_s"] <= NEAR * result["best_s"] else 1


if __name__ == "__main__":
    sys.exit(main())
