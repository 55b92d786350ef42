"""Compiled stages beside eager ones: steps, validations, B and W beside the joint backward, activations, first steps.

    python -m tests.bench.runtime.compiled_stages [--turns 7] [--sizes small] [--first-step [--runs ...] | --budgets]

All stages of a small GPT run on one device with one thread, as a worker runs them; eager and compiled steps take turns,
and a row is the median turn. ``small`` is a model whose operations cost more to launch than to compute, ``large`` one
whose time is matrix products. Activations are what a micro-batch's forward saves, parameters and inputs not counted.

``--first-step`` times ``raypipe train`` up to its first step instead: eager, compiled with an empty cache, compiled
with the cache that this has filled (or ``--cache``), and waiting for the compiled stages before the first step. It says
when the stages were swapped in and how long the longest step took. ``--budgets`` times
``parallel.activation_memory_budget`` beside layers that the plan recomputes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from torch import Tensor

from raypipe.job.spec import job_from
from raypipe.models import LayeredModel, build_model
from raypipe.observe.run_dir import STOP, ask
from raypipe.observe.run_log import EVENTS, METRICS, read_rows
from raypipe.runtime.compiled.compiler import TracedStage, compile_graph
from raypipe.runtime.compiled.cut import Cut
from raypipe.runtime.compiled.needs import Example
from tests.bench.command import options
from tests.runtime.compiled.pieces import compiled_device
from tests.runtime.runs.one_device import LR, OneDevice, even_cut, one_device

TEXT = {"type": "bytes", "path": str(Path(__file__).parents[3] / "docs")}
SIZES = {
    "small": {"layers": 4, "hidden": 64, "heads": 2, "sequence": 32, "microbatch": 2},
    "large": {"layers": 4, "hidden": 256, "heads": 4, "sequence": 128, "microbatch": 4},
}
MICROBATCHES = 4
RUNS: dict[str, dict[str, Any]] = {
    "eager": {}, "compiled": {"compile": "inductor"}, "waiting": {"compile": "inductor", "compile_first": True},
}  # fmt: skip
BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)


def model_of(name: str, dropout: float) -> tuple[LayeredModel, dict[str, Tensor], int]:
    """A GPT, a mini-batch for it, and the size of a micro-batch."""
    shape = dict(SIZES[name])
    microbatch = shape.pop("microbatch")
    job = job_from({
        "name": name, "model": {"type": "gpt", "vocabulary": 256, "dropout": dropout, **shape}, "data": TEXT,
        "train": {"steps": 1, "batch": microbatch * MICROBATCHES, "dtype": "float32"},
    })  # fmt: skip
    drawn = torch.randint(256, (microbatch * MICROBATCHES, shape["sequence"] + 1))
    model = build_model(job, None)
    return model, model.task.from_text(drawn, [0] * len(drawn)), microbatch


def step_s(made: OneDevice, step: int) -> float:
    """Seconds of one step."""
    began = time.perf_counter()
    made.executor.run(made.program, step, LR * 1e-6)
    return time.perf_counter() - began


def validation_s(made: OneDevice, batch: int) -> float:
    """Seconds of one validation batch."""
    began = time.perf_counter()
    made.executor.run(made.evaluate, batch, 0.0, split="val")
    return time.perf_counter() - began


def activation_bytes(made: OneDevice) -> int:
    """Bytes that the forward of a micro-batch saves, over all stages; of each storage once."""
    executor = made.executor
    own = {p.untyped_storage().data_ptr() for stage in made.stages for p in stage.parameters()}
    total, arrived = 0, ()
    executor.split, executor.step, executor.base, executor.computation.training = "train", 0, 0, True
    for number, stage in enumerate(made.stages):
        kept: list[Tensor] = []
        computed = executor._microbatches((number, 0), (0,))
        raw = [x for inputs in computed.inputs for x in inputs.values()]
        given = {x.untyped_storage().data_ptr() for x in (*arrived, *raw)}

        def pack(x: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(x)
            return x

        stage.track(arrived)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            outputs, graph = executor.computation.run((number, 0), computed, arrived, None)
        kept += getattr(graph, "saved", [])  # of a compiled stage, which autograd does not see
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
        total += sum(size for at, size in storages.items() if at not in own | given)
        arrived = tuple(y.detach() for y in outputs)
    return total


def compare(name: str, dropout: float, turns: int) -> None:
    """Print the rows of one model."""
    model, rows, microbatch = model_of(name, dropout)
    cut = even_cut(model, 2)
    made: dict[str, OneDevice] = {}
    for split in (False, True):
        made[f"eager {split}"] = one_device(model, cut, rows, torch.float32, microbatch, split=split)
        made[f"compiled {split}"], _, reports = compiled_device(
            model, cut, rows, torch.float32, microbatch, build=compile_graph, split=split, validates=not split
        )
        assert all(report.reason is None for report in reports), reports
    for device in made.values():
        for step in range(2):
            step_s(device, step)
            validation_s(device, step)
    validates = ("eager", "compiled")
    taken: dict[str, list[float]] = {kind: [] for kind in (*made, *validates)}
    for turn in range(turns):
        for kind, device in made.items():
            taken[kind].append(step_s(device, turn + 2))
        for kind in validates:
            taken[kind].append(validation_s(made[f"{kind} False"], turn))
    ms = {kind: median(times) * 1e3 for kind, times in taken.items()}
    for split, what in ((False, "joint backward"), (True, "B and W")):
        eager, compiled = ms[f"eager {split}"], ms[f"compiled {split}"]
        print(f"{name:5} dropout {dropout:3}  {what:14}  eager {eager:8.2f} ms  compiled {compiled:8.2f} ms  "
              f"{compiled / eager:.2f}")  # fmt: skip
    print(f"{name:5} dropout {dropout:3}  compiled B + W over compiled joint: "
          f"{ms['compiled True'] / ms['compiled False']:.3f}")  # fmt: skip
    print(f"{name:5} dropout {dropout:3}  validation      eager {ms['eager']:8.2f} ms  "
          f"compiled {ms['compiled']:8.2f} ms  {ms['compiled'] / ms['eager']:.2f}")  # fmt: skip
    eager, compiled = (activation_bytes(made[f"{kind} False"]) for kind in ("eager", "compiled"))
    print(f"{name:5} dropout {dropout:3}  activations a micro-batch: eager {eager / 2**20:.2f} MiB, "
          f"compiled {compiled / 2**20:.2f} MiB, {compiled / eager:.2f}", flush=True)  # fmt: skip


def kept_of(stage: TracedStage, example: Example, pieces: Cut) -> int:
    """Bytes from forward to backward: what arrived, and what is not computed again."""
    arrived = sum(spec.nbytes for spec in example.arrived)
    again = stage.needed.recomputes if example.segment is None else example.segment.recomputed
    return arrived + (0 if again else pieces.kept_bytes)


def budgets(name: str, dropout: float, turns: int) -> None:
    """Print what a share of the activations costs in time: computed again by the backward, or whole layers by R."""
    model, rows, microbatch = model_of(name, dropout)
    cut = even_cut(model, 2)
    whole_layers = {"half of the layers": set(range(1, model.count - 1, 2)), "all layers": set(range(model.count))}
    ways: dict[str, dict[str, Any]] = {f"compiled, budget {share}": {"budget": share} for share in BUDGETS}
    ways |= {
        f"compiled, R of {what}": {"recompute": True, "recomputed": layers} for what, layers in whole_layers.items()
    }
    made, kept = {}, {}
    for way, variant in ways.items():
        made[way], traced, _ = compiled_device(
            model, cut, rows, torch.float32, microbatch, build=compile_graph, **variant
        )
        kept[way] = sum(kept_of(stage, example, pieces) for stage in traced for example, _, pieces in stage.parts)
    for what, layers in whole_layers.items():
        made[f"eager, R of {what}"] = one_device(
            model, cut, rows, torch.float32, microbatch, recompute=True, recomputed=layers
        )
    made["eager"] = one_device(model, cut, rows, torch.float32, microbatch)
    taken: dict[str, list[float]] = {way: [] for way in made}
    for turn in range(turns + 2):  # the first two warm up
        for way, device in made.items():
            taken[way].append(step_s(device, turn))
    full = median(taken["compiled, budget 1.0"][2:])
    for way in made:
        ms, size = median(taken[way][2:]), kept.get(way)
        held = "" if size is None else f"keeps {size / 2**20:6.2f} MiB"
        print(f"{name:5} dropout {dropout:3}  {way:30} {ms * 1e3:8.2f} ms  {ms / full:.3f}  {held}", flush=True)


@dataclass(frozen=True)
class Start:
    """How a run began."""

    first_s: float
    """Seconds from the command to its first step."""
    swapped: int | None
    """The step before which the compiled stages were swapped in."""
    swapped_s: float | None
    """Seconds from the command to that step."""
    longest: float
    """The longest step after the first, in median steps before the swap."""

    def __str__(self) -> str:
        rest = "" if self.swapped is None else f"  swapped before step {self.swapped} at {self.swapped_s:.1f} s"
        return f"{self.first_s:6.1f} s{rest}  longest step {self.longest:.2f} median ones"


def start_of(folder: Path, run: str, cache: Path, **train: Any) -> Start:
    """Run ``raypipe train`` for 20 steps, and where stages are swapped in beside it, for 20 after that."""
    shape = {**SIZES["large"]}
    microbatch = shape.pop("microbatch")
    waits = train.get("compile", "none") == "none" or train.get("compile_first", False)
    job = {
        "name": "first", "model": {"type": "gpt", "vocabulary": 256, "dropout": 0.1, **shape}, "data": TEXT,
        "train": {"steps": 20 if waits else 100_000, "batch": 4 * microbatch, "eval_batches": 1, **train},
        "parallel": {"schedule": "zb-h1", "stages": 2, "microbatch": microbatch},
    }  # fmt: skip
    file = folder / f"{run}.yaml"
    file.write_text(yaml.safe_dump(job))
    metrics, events = folder / run / METRICS, folder / run / EVENTS
    command = [sys.executable, "-m", "raypipe", "train", str(file), "--run-dir", str(folder / run), "--json"]
    began = time.monotonic()
    environment: dict[str, Any] = {**os.environ, "RAYPIPE_CACHE_DIR": str(cache)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    first = swapped = swapped_s = None
    while process.poll() is None:
        if first is None and metrics.exists() and metrics.stat().st_size:
            first = time.monotonic() - began
        if not waits and swapped is None and events.exists() and b'"swapped"' in events.read_bytes():
            swapped_s = time.monotonic() - began
            (swapped,) = [row["step"] for row in read_rows(events) if row["event"] == "swapped"]
        if swapped is not None and len(read_rows(metrics)) > swapped + 20:
            ask(folder / run, STOP, "it has seen enough")
        time.sleep(0.02)
    assert process.returncode == 0
    assert first is not None
    steps = [row["step_s"] for row in read_rows(metrics) if row.get("step_s") is not None]
    before = steps[1 : 20 if swapped is None else swapped - 1]
    return Start(first, swapped, swapped_s, max(steps[1:]) / median(before))


def main() -> None:
    """Measure and print."""
    runs = ("eager", "eager", "compiled", "compiled", "waiting")
    asked = options(__doc__, turns=7, sizes=SIZES, first_step=False, budgets=False, runs=runs, cache=Path)
    with tempfile.TemporaryDirectory(prefix="raypipe-compiled-") as name:
        folder = Path(name)
        if asked.first_step:
            for number, run in enumerate(asked.runs):
                start = start_of(folder, f"run{number}", asked.cache or folder / "cache", **RUNS[run])
                print(f"{run:12} {start}", flush=True)
            return
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")
        torch.set_num_threads(1)
        for size in asked.sizes:
            if asked.budgets:
                budgets(size, 0.1, asked.turns)
                continue
            compare(size, 0.1, asked.turns)


if __name__ == "__main__":
    main()
