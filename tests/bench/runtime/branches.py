"""Models cut as graphs of branches, beside the best chain: ``python -m tests.bench.runtime.branches [NAME ...]``.

For CLIP's two towers, T5 and Inception-V3 (small images), each from its configuration: bytes that a micro-batch sends
between devices, the predicted step, and the step emulated by real actors, programs and messages with timed waits, of
the best chain and of branches. Both have the same pieces, costs (of a described machine, all scaled alike so that tasks
take milliseconds) and search of orders.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from raypipe.job import JobSpec
from raypipe.job.cluster import load_cluster
from raypipe.job.spec import job_from
from raypipe.launch.plans import layer_costs
from raypipe.models import build_model
from raypipe.models.task import Field
from raypipe.plan.branches import LayerCosts, choose_branches
from raypipe.runtime.emulation.emulated_run import rehearsal
from raypipe.runtime.emulation.links import Links
from tests.bench.command import options
from tests.bench.turns import Turns, table, take_turns
from tests.plan.chains import best_chain

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


def compare(names: list[str]) -> list[dict[str, Any]]:
    """Emulate the best chain and the branches of each case."""
    rows, turns = [], []
    for name in names:
        case = CASES[name]
        job = case.job()
        model = build_model(job, case.fields)
        machine = load_cluster(Path(f"cluster/devices/{case.machine}.yaml"))
        costs = scaled(layer_costs(job, model, machine), case.microbatches)
        for how, choose in (("chain", best_chain), ("branches", choose_branches)):
            result = choose(costs, case.devices, case.microbatches)
            turns.append(Turns(rehearsal(result.schedule, result.arranged.table, Links(), 1), how))
            rows.append({
                "case": name, "cut": how, "pieces": model.count, "stages": len(result.arranged.cut),
                "sent_mb": result.arranged.sent_bytes / 1e6, "one_device_s": STEP_S,
            })  # fmt: skip
    take_turns(turns, 1, STEPS)
    for row, one in zip(rows, turns, strict=True):
        row |= {"predicted_s": one.predicted_s, "measured_s": one.step_s, "over": one.error}
    return rows


def main() -> None:
    """Run the cases that are named, or all."""
    rows = compare(options(__doc__, CASES).names or list(CASES))
    with contextlib.redirect_stdout(sys.stderr):
        table("", list(rows[0]), [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()]
                                  for row in rows], words=2)  # fmt: skip
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
