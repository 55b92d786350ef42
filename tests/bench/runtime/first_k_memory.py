"""Memory of reverse first-k under a cap: ``python -m tests.bench.runtime.first_k_memory``.

Two copies of a stack of wide layers, one stage each: what a weight gradient waits for, a layer's input and its output's
gradient, is twice what the backward frees a layer, so that further layers cost memory. (In a GPT it is less than what
is freed, and no k takes more than the usual backward.) The first run may postpone all layers and says, from what a step
held, what each k would take at its fullest (Oh et al. 2022, Algorithm 2: M()). Then the cap is put between two of these
figures, so that it allows some layers only. Measured is the most that malloc has handed out at any moment of the later
steps, on each worker; both figures less what its process had once it had trained something tiny. Limits: the k that the
cap allows, a measured peak within 5 % of the model's figure for that k, and below the cap. Needs no quiet machine.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.data import declared_fields, prepare_data
from raypipe.job.load import job_from
from raypipe.models import build_model
from raypipe.observe.run_log import EVENTS, RunLog, read_rows
from raypipe.runtime.cluster.connect import connect
from raypipe.runtime.driver import Driver
from raypipe.runtime.executor.step import StepResult
from raypipe.runtime.group.worker_group import start_worker_group
from raypipe.runtime.hosts.reserve import reserve
from raypipe.schedule.lowering.asynchronous import WHOLE, Part
from raypipe.train import make_plan
from tests.bench.accuracy.memory import Peak, PeakStage, own_ray

LIMIT = 0.05
"""Share by which a measured peak may differ from the model's."""
LAYERS, WIDTH, ROWS, STEPS = 8, 256, 4096, 7
SETTLED = 5
"""The first step all of whose gradients wait as the run has settled."""
MIB = 2**20


class Wide(nn.Module):
    """Layers whose activations are large beside their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, image: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The loss of rows of numbers (rows, width) and their classes (rows,)."""
        for layer in self.layers:
            image = torch.relu(layer(image))
        return {"loss": F.cross_entropy(image, labels)}


class SettledStage(PeakStage):
    """A stage actor that knows the most memory it had since k was settled."""

    def run_step(self, step: int, part: Part = WHOLE) -> StepResult | None:
        """As ever; what came before is forgotten."""
        if step <= SETTLED:
            self.peak = Peak(0, 0)
        return super().run_step(step, part)

    def figures(self) -> tuple[int, int]:
        """Bytes allocated at the fullest moment, and before the job."""
        return self.peak.allocated, self.base.allocated


class Run(NamedTuple):
    """One run; sizes in bytes."""

    k: int
    most: int
    by_k: list[float]
    peaks: list[int]
    bases: list[int]


def run(cap_mb: float, folder: Path) -> Run:
    """Train with all layers asked to wait."""
    file = folder / "rows.npz"
    if not file.exists():
        draw = np.random.default_rng(0)
        rows = draw.normal(size=(3 * ROWS, WIDTH)).astype(np.float32)
        np.savez(file, image=rows, labels=draw.integers(0, 10, 3 * ROWS))
    job = job_from({
        "name": "first-k", "data": {"type": "arrays", "path": str(file)},
        "model": {"import": "tests.bench.runtime.first_k_memory:Wide", "loss": "model"},
        "train": {"steps": STEPS, "batch": 2 * ROWS, "lr": 0.001, "eval_batches": 1},
        "parallel": {"replicas": 2, "microbatch": ROWS, "sync": "reverse-first-k", "first_k": LAYERS,
                     "memory_cap_mb": cap_mb},
    })  # fmt: skip
    with tempfile.TemporaryDirectory(dir=folder) as name:
        directory = Path(name)
        prepare_data(job, build_model(job, declared_fields(job.data)).task, directory / "data")
        log = RunLog(directory)
        driver = Driver(job, make_plan(job), directory, log, lambda *_: None)
        workers = start_worker_group(driver.schedule, 2, reserve(2, connect(2), 120.0), SettledStage)
        try:
            driver.run(workers, None, 0)
            peaks, bases = zip(*ray.get(workers.call("figures")), strict=True)
        finally:
            workers.stop()
            log.close()
        (told,) = (row for row in read_rows(directory / EVENTS) if row["event"] == "first_k")
    return Run(told["k"], told["most"], told["bytes_by_k"], list(peaks), list(bases))


def off(found: Run) -> list[float]:
    """Per worker, the share by which the model's figure is above what was measured, without the process itself."""
    model = found.by_k[found.k]
    return [(model - base) / (peak - base) - 1 for peak, base in zip(found.peaks, found.bases, strict=True)]


def checked(folder: Path) -> tuple[list[Run], list[str]]:
    """An uncapped run and a capped one, and what is outside the limits."""
    free = run(1e6, folder)
    steps = free.by_k
    costly = [k for k in range(1, free.k) if steps[k + 1] > steps[k] * 1.02]  # those that a cap can single out
    k = costly[len(costly) // 2] if costly else 0
    capped = run((steps[k] + steps[k + 1]) / 2 / MIB, folder)
    wrong = [
        f"k = {one.k}: off {max(off(one), key=abs):+.1%}" for one in (free, capped) if max(map(abs, off(one))) > LIMIT
    ]
    wrong += [f"k = {free.k} without a cap, {capped.k} with one for {k}"] if (free.k, capped.k) != (LAYERS, k) else []
    if max(capped.peaks) > (steps[k] + steps[k + 1]) / 2:
        wrong.append("the peak is above the cap")
    return [free, capped], wrong


def main() -> int:
    """Print a line for each run; exit status 1 outside the limits."""
    with (
        contextlib.redirect_stdout(sys.stderr), own_ray(),
        tempfile.TemporaryDirectory(prefix="raypipe-first-k-") as name,
    ):  # fmt: skip
        runs, wrong = checked(Path(name))
    for one in runs:
        words: dict[str, Any] = {
            "model": one.by_k[one.k] - one.bases[0], "measured": max(one.peaks) - one.bases[0],
            "with k = 0": one.by_k[0] - one.bases[0],
        }  # fmt: skip
        sizes = ", ".join(f"{name} {size / MIB:.1f} MiB" for name, size in words.items())
        print(f"k = {one.k} of {LAYERS}, memory allows {one.most}: {sizes}, off {max(off(one), key=abs):+.1%}")
    for line in wrong:
        print(f"outside the limits: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
