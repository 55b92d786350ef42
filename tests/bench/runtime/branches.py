"""Models cut as graphs of branches, beside the best chain: ``python -m tests.bench.runtime.branches [NAME ...]``.

For CLIP's two towers, T5 and Inception-V3 (small images), each from its configuration: bytes that a micro-batch sends
between devices, the predicted step, and the step emulated by real actors, programs and messages with timed waits, of
the best chain and of branches. Both have the same pieces, costs (of a described machine, all scaled alike so that tasks
take milliseconds) and search of orders. ``--real`` instead trains Inception-V3 on two CPU actors and on one, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from raypipe.job import JobSpec
from raypipe.job.cluster import load_cluster
from raypipe.job.load import job_from
from raypipe.launch.plans import layer_costs
from raypipe.models import build_model
from raypipe.models.task import Field
from raypipe.plan.branches.arranged import LayerCosts
from raypipe.plan.branches.choose import Branches, best_chain, choose_branches
from raypipe.runtime.emulation.emulated_run import rehearsal, run_rehearsal
from raypipe.runtime.emulation.links import Links
from raypipe.runtime.group.worker_group import WorkerGroup
from tests.bench.accuracy.emulated import first, worker_group_of

STEPS = 8
STEP_S = 0.6
"""What a step takes on one device, after scaling."""
TEXT = {"width": 512, "layers": 12, "heads": 8, "vocabulary": 49408, "length": 77}
IMAGE = {"width": 768, "layers": 12, "heads": 12, "side": 224, "patch": 32}
"""Those of CLIP ViT-B/32."""


@dataclass(frozen=True)
class Case:
    """A model on some devices of a machine."""

    model: dict[str, Any]
    fields: dict[str, Field]
    machine: str
    """A file of ``cluster/devices``."""
    devices: int
    microbatch: int
    microbatches: int
    parallel: dict[str, Any] = field(default_factory=dict)

    def job(self) -> JobSpec:
        """As a job file."""
        return job_from(
            {
                "name": "branches", "model": self.model, "data": {"type": "arrays", "path": "unused.npz"},
                "train": {"steps": 1, "batch": self.microbatch * self.microbatches},
                "parallel": {"schedule": "auto", "placement": "branches", "stages": self.devices,
                             "microbatch": self.microbatch},
            }
        )  # fmt: skip


TOKENS = Field((64,), torch.int64)
CLIP = {"import": "jobs.two_towers:build", "loss": "model", "args": {"text": TEXT, "image": IMAGE, "shared": 512}}
PAIRS = {"ids": Field((77,), torch.int64), "image": Field((3, 224, 224), torch.float32)}
T5 = {"hf": "t5", "config": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}}
WORDS = {"input_ids": TOKENS, "attention_mask": TOKENS, "labels": TOKENS}
INCEPTION = {"import": "jobs.inception_v3:build", "args": {"classes": 10}}
IMAGES = {"image": Field((3, 75, 75), torch.float32), "labels": Field((), torch.int64)}
CASES = {
    "clip-2": Case(CLIP, PAIRS, "rtx3090-ethernet", 2, 32, 4),
    "clip-4": Case(CLIP, PAIRS, "rtx3090-ethernet", 4, 32, 8),
    "t5-2": Case(T5, WORDS, "rtx3090-ethernet", 2, 32, 4),
    "t5-4": Case(T5, WORDS, "rtx3090-ethernet", 4, 32, 8),
    "inception-2": Case(INCEPTION, IMAGES, "v100", 2, 64, 1),
}


def scaled(costs: LayerCosts, microbatches: int) -> LayerCosts:
    """The same costs with all times, also those of messages, in proportion: a step on one device takes ``STEP_S``."""
    k = STEP_S / (sum(costs.whole) * microbatches)
    times = {name: tuple(k * t for t in getattr(costs, name)) for name in ("forward", "input_grad", "weight_grad")}
    return replace(costs, **times, latency_s=k * costs.latency_s, bytes_per_s=costs.bytes_per_s / k)


def emulated(found: Branches, workers: WorkerGroup) -> tuple[float, float]:
    """Predicted and measured seconds of a step, the measured ones a median."""
    what = rehearsal(found.schedule, found.arranged.table, Links(), 1)
    with contextlib.redirect_stdout(sys.stderr):
        done = run_rehearsal(what, first(workers, what.schedule.devices), STEPS)
    return what.steady_s(), median(done.measured_s[2:])


def compare(names: list[str]) -> list[dict[str, Any]]:
    """Emulate the best chain and the branches of each case; one fleet serves all cases of so many devices."""
    rows = []
    for devices in sorted({CASES[name].devices for name in names}):
        with contextlib.redirect_stdout(sys.stderr):
            fleet = worker_group_of(devices)
            workers = fleet.__enter__()
        try:
            for name in names:
                if CASES[name].devices == devices:
                    rows += both(name, workers)
        finally:
            fleet.__exit__(None, None, None)
    return rows


def both(name: str, workers: WorkerGroup) -> list[dict[str, Any]]:
    """A case as a chain and as branches."""
    case, rows = CASES[name], []
    job = case.job()
    model = build_model(job, case.fields)
    machine = load_cluster(Path(f"cluster/devices/{case.machine}.yaml"))
    costs = scaled(layer_costs(job, model, machine), case.microbatches)
    for how, choose in (("chain", best_chain), ("branches", choose_branches)):
        found = choose(costs, case.devices, case.microbatches)
        predicted, measured = emulated(found, workers)
        rows.append({
            "case": name, "cut": how, "pieces": model.count, "stages": len(found.arranged.cut),
            "sent_mb": found.arranged.sent_bytes / 1e6, "predicted_s": predicted, "measured_s": measured,
            "over": measured / predicted - 1, "one_device_s": STEP_S,
        })  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def real(steps: int, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Train Inception-V3 on images of 75 x 75 by two CPU actors, as branches, and by one; seconds of a step."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "images.npz"
        draw = np.random.default_rng(0)
        np.savez(file, image=draw.normal(size=(256, 3, 75, 75)).astype(np.float32), labels=draw.integers(0, 10, 256))
        for turn in range(rounds):
            for devices in (1, 2):
                parallel: dict[str, Any] = {"schedule": "auto", "placement": "branches", "stages": devices}
                job = {
                    "name": f"inception-{devices}", "model": INCEPTION, "data": {"type": "arrays", "path": str(file)},
                    "train": {"steps": steps, "batch": batch, "eval_every": 0, "checkpoint_every": 0},
                    "parallel": {**parallel, "microbatch": batch},
                }  # fmt: skip
                path = Path(folder) / f"{turn}-{devices}.yaml"
                path.write_text(json.dumps(job))
                command = [sys.executable, "-m", "raypipe", "train", str(path), "--json", "--run-dir", str(path)[:-5]]
                said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                done = json.loads(said.splitlines()[-1])
                rows.append({"case": "inception, real", "turn": turn, "devices": devices,
                             "step_s": done["step_s_median"], "loss": done["loss"]})  # fmt: skip
    return rows


def main() -> None:
    """Run the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *CASES])
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    os.environ.setdefault("RAY_ADDRESS", "local")
    rows = real(asked.steps, asked.batch, asked.rounds) if asked.real else compare(asked.names or list(CASES))
    table = Table()
    for key in rows[0]:
        table.add_column(key)
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(file=sys.stderr, width=160).print(table)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
