"""Memory of real CPU runs against its prediction: ``python -m tests.bench.memory``.

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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import ray
from rich.console import Console
from rich.table import Table

from raypipe.cost.memory import device_memory
from raypipe.cost.profile import Profile
from raypipe.data import prepare
from raypipe.job.load import job_from
from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import RunLog
from raypipe.plan.plan import build_schedule
from raypipe.runtime.actor import Stage
from raypipe.runtime.allocated import PeakMeter, allocated_bytes, process_bytes
from raypipe.runtime.cluster import connect
from raypipe.runtime.driver import Driver
from raypipe.runtime.launch import start_fleet
from raypipe.runtime.profiling import measure_profile
from raypipe.runtime.step import StepResult
from raypipe.schedule.endless import WHOLE, Part
from raypipe.train import make_plan

LIMIT = 0.10
"""Largest share by which the fullest device's peak may differ from its prediction."""
MODEL = {"type": "gpt", "layers": 8, "hidden": 256, "heads": 8, "sequence": 128, "vocabulary": 256, "dropout": 0.0}
STEPS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    schedule: str
    parallel: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """For the table."""
        return ", ".join(f"{k} {v}" for k, v in {**self.parallel, **self.train}.items() if k != "microbatch")

    def job(self) -> JobSpec:
        """As a job file would say it."""
        train = {"steps": STEPS, "batch": 32, "optimizer": "adamw", "lr": 0.001, "eval_batches": 1, **self.train}
        return job_from(
            {
                "name": "memory", "model": {**MODEL, "tie_embeddings": False},
                "data": {"type": "bytes", "path": "stdlib"}, "train": train,
                "parallel": {"schedule": self.schedule, "stages": 2, "microbatch": 4, **self.parallel},
            }
        )  # fmt: skip


CASES = (
    Case("1f1b"),
    Case("gpipe"),
    Case("gpipe", {"stages": 1}),
    Case("1f1b", {"stages": 1}, {"optimizer": "sgd"}),
    Case("1f1b", {"stages": 1, "replicas": 2}),
    Case("interleaved-1f1b", {"chunks": 2}),
    Case("zb-h1"),
    Case("zb-v"),
    Case("zeropp", {"chunks": 2, "unit": 4}),
    Case("chimera"),
    Case("gpipe", {"recompute": "full"}),
    Case("gpipe", {"microbatch": 2}),
    Case("pipedream-2bw"),
    Case("1f1b", {"microbatch": 1}, {"dtype": "bfloat16"}),
    Case("zb-h1", {}, {"dtype": "bfloat16"}),
)


def status(field: str) -> int:
    """Bytes that the kernel says of this process."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class Peak(NamedTuple):
    """Bytes at the fullest moment of any step, less what the process took at its start."""

    allocated: int
    resident: int


class PeakStage(Stage):
    """A stage actor that knows the most memory it ever had."""

    def __init__(self, rank: int, title: str) -> None:
        super().__init__(rank, title)
        process_bytes(self.device)  # for what it loads
        self.base = Peak(allocated_bytes(self.device), status("RssAnon"))
        self.peak = Peak(0, 0)

    def run_step(self, step: int, part: Part = WHOLE) -> StepResult:
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
    plan = make_plan(job)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        directory = Path(name)
        prepare(job.data, MODEL["sequence"], directory / "data")
        log = RunLog(directory)
        driver = Driver(job, plan, directory, log, lambda *_: None)
        fleet = start_fleet(driver.schedule, plan.parallel.replicas, connect(driver.schedule.devices), PeakStage)
        try:
            driver.run(fleet, None, 0)
            return ray.get(fleet.call("held"))
        finally:
            fleet.stop()
            log.close()


def predicted(job: JobSpec, profile: Profile) -> list[float]:
    """The same by the memory model."""
    plan = make_plan(job)
    schedule = build_schedule(plan, job.train.batch)
    found = device_memory(profile, plan.cut, schedule, plan.parallel.microbatch, optimizer=job.train.optimizer)
    return [device.total - device.base for device in found]


@contextlib.contextmanager
def own_ray() -> Iterator[None]:
    """A local Ray for two devices."""
    os.environ.setdefault("RAY_ADDRESS", "local")
    connect(2)
    try:
        yield
    finally:
        ray.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.memory", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these schedules")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    cases = [case for case in CASES if args.only is None or case.schedule in args.only]
    out, progress = Console(width=110), Console(stderr=True)
    rows: list[dict[str, Any]] = []
    with (
        contextlib.redirect_stdout(sys.stderr), own_ray(),
        tempfile.TemporaryDirectory(prefix="raypipe-memory-") as name,
    ):  # fmt: skip
        sizes = sorted({case.job().parallel.microbatch for case in cases} | {2})
        profiles: dict[str, Profile] = {}
        for case in cases:
            job = case.job()
            if job.train.dtype not in profiles:
                profiles[job.train.dtype] = measure_profile(job, sizes, 2, quick=True)
            profile = profiles[job.train.dtype]
            progress.print(f"{case.schedule} {case.label}", style="dim")
            want, peaks = predicted(job, profile), measured(job, Path(name))
            have = [peak.allocated for peak in peaks]
            fullest = max(range(len(have)), key=lambda d: have[d])
            rows.append(
                {"schedule": case.schedule, "configuration": case.label, "predicted_bytes": want,
                 "measured_bytes": have, "resident_bytes": [peak.resident for peak in peaks],
                 "difference": want[fullest] / have[fullest] - 1}
            )  # fmt: skip
    table = Table(title="memory of the fullest device beside its empty process, MB", title_justify="left")
    for heading in ("schedule", "configuration", "predicted", "measured", "all devices", "difference", "resident"):
        table.add_column(heading, justify="left" if heading in ("schedule", "configuration") else "right")
    for row in rows:
        d = max(range(len(row["measured_bytes"])), key=lambda d: row["measured_bytes"][d])
        every = " ".join(
            f"{p / h - 1:+.0%}" for p, h in zip(row["predicted_bytes"], row["measured_bytes"], strict=True)
        )
        table.add_row(
            row["schedule"], row["configuration"], f"{row['predicted_bytes'][d] / 1e6:.0f}",
            f"{row['measured_bytes'][d] / 1e6:.0f}", every, f"{row['difference']:+.1%}",
            f"{row['resident_bytes'][d] / 1e6:.0f}",
        )  # fmt: skip
    out.print(table)
    errors = [abs(row["difference"]) for row in rows]
    out.print(f"{len(rows)} runs: median {median(errors):.1%}, worst {max(errors):.1%} (at most {LIMIT:.0%})")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if max(errors) <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
