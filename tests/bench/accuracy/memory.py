"""Memory of real CPU runs against its prediction: ``python -m tests.bench.accuracy.memory``.

Measured is the most that malloc has handed out on each device at any moment of a few training steps, less what its
process had once it had trained something tiny; predicted is ``cost.memory`` on a profile measured just before, its base
left out likewise. So nothing of the 400 MB that such a process takes makes a poor prediction look good. Shown beside:
the resident set's peak, counted in the same way, which is larger by the pages that malloc keeps between what it has
handed out. Needs no quiet machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import ray
from rich.console import Console
from rich.table import Table

from raypipe.cost.memory import DeviceMemory, device_memory
from raypipe.cost.profile import Profile
from raypipe.job.requested_schedule import layers_to_recompute
from raypipe.job.spec import JobSpec, job_from
from raypipe.models import build_model
from raypipe.plan.online.better_order import runs_ahead
from raypipe.plan.plan import build_schedule
from raypipe.profiling.profile_job import measure_profile
from raypipe.profiling.profiling_worker import process_bytes
from raypipe.runtime.cluster.connect import connect
from raypipe.runtime.executor.step import StepResult
from raypipe.runtime.process.memory import PeakMeter, allocated_bytes
from raypipe.runtime.setup.setup import Setup
from raypipe.runtime.worker.worker import StageWorker
from raypipe.schedule.costs import CostTable
from raypipe.schedule.lowering.asynchronous import WHOLE, Part
from raypipe.train import make_plan
from tests.runtime.runs.small_runs import new_driver, own_workers

LIMIT = 0.10
"""Largest share by which the fullest device's peak may differ from its prediction."""
MODEL = {"type": "gpt", "layers": 8, "hidden": 256, "heads": 8, "sequence": 128, "vocabulary": 256, "dropout": 0.0,
         "tie_embeddings": False}  # fmt: skip
STEPS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    schedule: str
    parallel: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    """Changes to ``MODEL``; a whole model where it is a captured one."""
    images: int = 0
    """Trains on images of so many pixels a side instead of text."""

    @property
    def label(self) -> str:
        """For the table."""
        model = {k: v for k, v in self.model.items() if k not in ("config", "args", "loss")}
        every = {**self.parallel, **self.train, **model}
        return ", ".join(f"{k} {v}" for k, v in every.items() if k != "microbatch" or "model" not in every)

    def job(self, folder: Path) -> JobSpec:
        """As a job file would say it; ``folder`` for the data."""
        captured = "hf" in self.model or "import" in self.model
        train = {"steps": STEPS, "batch": 32, "optimizer": "adamw", "lr": 0.001, "eval_batches": 1, **self.train}
        return job_from(
            {
                "name": "memory", "model": self.model if captured else {**MODEL, **self.model}, "train": train,
                "data": pictures(folder, self.images) if self.images else {"type": "bytes", "path": "stdlib"},
                "parallel": {"schedule": self.schedule, "stages": 2, "microbatch": 4, **self.parallel},
            }
        )  # fmt: skip


def pictures(folder: Path, size: int) -> dict[str, str]:
    """Some images of noise in ten classes."""
    file = folder / f"images-{size}.npz"
    if not file.exists():
        draw = np.random.default_rng(0)
        image = draw.normal(size=(96, 3, size, size)).astype(np.float32)
        np.savez(file, image=image, labels=draw.integers(0, 10, 96))
    return {"type": "arrays", "path": str(file)}


GPT2 = {
    "hf": "gpt2", "sequence": 128,
    "config": {"n_layer": 4, "n_embd": 256, "n_head": 8, "n_positions": 128, "vocab_size": 1000, "bos_token_id": 0,
               "eos_token_id": 0},
}  # fmt: skip
LLAMA = {
    "hf": "llama", "sequence": 128,
    "config": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
               "intermediate_size": 704, "vocab_size": 2000, "max_position_embeddings": 128},
}  # fmt: skip
CNN = {"import": "tests.capture.models:ResNet", "loss": "model"}
TIED = {"tie_embeddings": True, "vocabulary": 4000, "layers": 4}
CASES = (
    Case("1f1b"),
    Case("gpipe", {"microbatch": 16}),
    Case("gpipe", {"stages": 1}),
    Case("1f1b", {"stages": 1}, {"optimizer": "sgd", "momentum": 0.9}),
    Case("1f1b", {"stages": 1, "replicas": 2, "sync": "eager"}),
    Case("1f1b", {"replicas": 2}, {"clip": 1.0}),
    Case("interleaved-1f1b", {"chunks": 2}),
    Case("zb-h1"),
    Case("zb-v"),
    Case("zeropp", {"chunks": 2, "unit": 4}),
    Case("fast-forward", {"chunks": 2}),
    Case("chimera"),
    Case("chimera", {"stages": 4, "pipelines": 4, "microbatch": 2}),
    Case("chimera", {"stages": 4, "concat": "doubling"}),
    Case("gems"),
    Case("pipedream"),
    Case("pipedream-2bw"),
    Case("gpipe", {"recompute": "full"}),
    Case("gpipe", {"recompute": "stage-aware", "alphas": 0.5}),
    Case("1f1b", {"recompute": ["block.1", "block.2", "block.5"], "wire_dtype": "bfloat16"}),
    Case("1f1b", {}, {}, TIED),
    Case("chimera", {}, {}, TIED),
    Case("1f1b", {"microbatch": 1}, {"batch": 4}, {"sequence": 2048, "layers": 4}),
    Case("1f1b", {}, {"batch": 16}, {"sequence": 32, "vocabulary": 32000, "layers": 2}),
    Case("1f1b", {}, {}, GPT2),
    Case("zb-v", {}, {}, LLAMA),
    Case("1f1b", {}, {"batch": 64}, CNN, images=160),
    Case("1f1b", {"microbatch": 1}, {"dtype": "bfloat16", "batch": 8}),
    Case("zb-h1", {}, {"dtype": "bfloat16", "batch": 16}),
    Case("zb-h1", {"recompute": ["block.1", "block.2", "block.5"]}, {"dtype": "bfloat16", "batch": 16}),
    Case("1f1b", {}, {"dtype": "bfloat16"}, GPT2),
)


def status(field: str) -> int:
    """Bytes that the kernel says of this process."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class Peak(NamedTuple):
    """Bytes at the fullest moment of any step, less what the process took at its start."""

    allocated: int
    resident: int


class PeakStage(StageWorker):
    """A stage actor that knows the most memory it ever had."""

    def setup(self, setup: Setup) -> tuple[int, list[str]]:
        """As ever; but first look at the process with all the code that it will need, and the model's graph."""
        described = build_model(setup.job, setup.fields)
        process_bytes(self.device, setup.job)
        self.base = Peak(allocated_bytes(self.device), status("RssAnon"))
        self.peak = Peak(0, 0)
        del described
        return super().setup(setup)

    def run_step(self, step: int, part: Part = WHOLE) -> StepResult | None:
        """As ever; then look at malloc's and the kernel's own records."""
        with PeakMeter(self.device) as meter:
            result = super().run_step(step, part)
        # Pages of files, the corpus and code, are the page cache's: they go when memory is needed.
        resident = status("VmHWM") - status("RssFile") - status("RssShmem")
        self.peak = Peak(max(self.peak.allocated, meter.peak), resident)
        return result

    def held(self) -> Peak:
        """Since the process was empty."""
        return Peak(self.peak.allocated - self.base.allocated, self.peak.resident - self.base.resident)


def measured(job: JobSpec, folder: Path) -> list[Peak]:
    """Of every device."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        driver = new_driver(job, Path(name))
        with own_workers(driver, PeakStage) as workers:
            driver.run(workers, None, 0)
            return ray.get(workers.call("held"))


def predicted(job: JobSpec, profile: Profile) -> list[DeviceMemory]:
    """The same by the memory model."""
    plan = make_plan(job)
    schedule = build_schedule(plan, job.train.batch)
    found = device_memory(
        profile, plan.cut, schedule, plan.parallel.microbatch, optimizer=job.train.optimizer,
        momentum=job.train.momentum, recomputed=layers_to_recompute(plan.parallel, plan.cut),
        ahead=runs_ahead(plan.parallel, job.train.clip is not None, schedule, CostTable.even(schedule.stages)),
    )  # fmt: skip
    return [replace(device, base=device.base - profile.base_bytes) for device in found]


@contextlib.contextmanager
def own_ray() -> Iterator[None]:
    """A local Ray for four devices, which take turns where there are fewer cores."""
    os.environ.setdefault("RAY_ADDRESS", "local")
    connect(4)
    try:
        yield
    finally:
        ray.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.accuracy.memory", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these schedules, or numbers of cases, as 3 or 5:9")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    cases = [case for n, case in enumerate(CASES) if args.only is None or any(wanted(o, n, case) for o in args.only)]
    out, progress = Console(width=130), Console(stderr=True)
    rows: list[dict[str, Any]] = []
    with (
        contextlib.redirect_stdout(sys.stderr), own_ray(),
        tempfile.TemporaryDirectory(prefix="raypipe-memory-") as name,
    ):  # fmt: skip
        folder = Path(name)
        sizes: dict[str, set[int]] = defaultdict(set)
        for case in cases:
            job = case.job(folder)
            sizes[profiled(job)] |= {job.parallel.microbatch, 2}
        profiles: dict[str, Profile] = {}
        for case in cases:
            job = case.job(folder)
            key = profiled(job)
            began = time.monotonic()
            if key not in profiles:
                profiles[key] = measure_profile(job, sorted(sizes[key]), 2, quick=True)
            ready = time.monotonic()
            want, peaks = predicted(job, profiles[key]), measured(job, folder)
            have = [peak.allocated for peak in peaks]
            off = [memory.total / size - 1 for memory, size in zip(want, have, strict=True)]
            rows.append(
                {"schedule": case.schedule, "configuration": case.label,
                 "predicted_bytes": [memory.total for memory in want], "terms": [m.terms() for m in want],
                 "measured_bytes": have, "resident_bytes": [peak.resident for peak in peaks],
                 "difference": max(off, key=abs)}
            )  # fmt: skip
            progress.print(
                f"{case.schedule} {case.label}: {' '.join(f'{x:+.1%}' for x in off)}, profile {ready - began:.0f} s, "
                f"run {time.monotonic() - ready:.0f} s", style="dim", highlight=False, soft_wrap=True,
            )  # fmt: skip
    table = Table(title="memory of devices beside their empty process, fullest one's in MB", title_justify="left")
    for heading in ("schedule", "configuration", "predicted", "measured", "all devices", "resident"):
        table.add_column(heading, justify="left" if heading in ("schedule", "configuration") else "right")
    for row in rows:
        d = max(range(len(row["measured_bytes"])), key=lambda d: row["measured_bytes"][d])
        every = " ".join(
            f"{p / h - 1:+.1%}" for p, h in zip(row["predicted_bytes"], row["measured_bytes"], strict=True)
        )
        table.add_row(
            row["schedule"], row["configuration"], f"{row['predicted_bytes'][d] / 1e6:.0f}",
            f"{row['measured_bytes'][d] / 1e6:.0f}", every, f"{row['resident_bytes'][d] / 1e6:.0f}",
        )  # fmt: skip
    out.print(table)
    errors = [abs(row["difference"]) for row in rows]
    out.print(
        f"{len(rows)} runs, each one's worst device: median {median(errors):.1%}, worst {max(errors):.1%} "
        f"(at most {LIMIT:.0%})"
    )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if max(errors) <= LIMIT else 1


def wanted(asked: str, number: int, case: Case) -> bool:
    """Whether ``--only`` means a case."""
    if not asked[0].isdigit():
        return asked == case.schedule
    first, _, last = asked.partition(":")
    return int(first) <= number <= int(last or first)


def profiled(job: JobSpec) -> str:
    """What a profile depends on."""
    return json.dumps([job.model.model_dump(mode="json"), job.train.dtype])


if __name__ == "__main__":
    sys.exit(main())
