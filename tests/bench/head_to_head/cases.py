"""What is measured: a model bound by arithmetic, small ones bound by all else, and the schedules both sides know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raypipe.job.spec import JobSpec, job_from

DEVICES = 2
CHUNKED = ("interleaved-1f1b", "zb-v")
"""Schedules with two stages a device."""
SHARED = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
"""Schedules that run on both sides: torch has a class for each but ``zb-h1``, whose order its CSV runtime loads."""
DATA_PARALLEL = "data-parallel"
"""No pipeline: every device holds the whole model. torch's side is DistributedDataParallel."""
ZERO3 = "zero3"
"""No pipeline, and the devices divide weights, gradients and optimizer state. torch's side is FSDP2."""
UNCUT = {DATA_PARALLEL: "ddp", ZERO3: "fsdp2"}
"""What torch's side is asked for (``blocks.Order.kind``) where there is no pipeline."""
PEERS = {"deepspeed": ("1f1b", *UNCUT), "accelerate": (DATA_PARALLEL,)}
"""What else takes a turn, and at which schedules. DeepSpeed's pipeline engine knows 1F1B alone. accelerate has no
pipeline that trains, and no FSDP on CPUs: it takes the plugin and trains whole copies."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model and mini-batch."""

    name: str
    about: str
    model: dict[str, Any]
    microbatch: int
    microbatches: int
    schedules: tuple[str, ...]
    steps: int
    """Steps of a block: one contender's turn in a round."""
    warm_up: int
    """Steps at the start of a block that are left out."""
    target: float
    """Largest raypipe / torch that the project wants to see here."""

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.microbatch * self.microbatches

    def job(self, schedule: str, steps: int) -> JobSpec:
        """The job as raypipe runs it; the rivals take model, data, optimizer and mini-batch from it too.

        Raises:
            SpecError: raypipe cannot run this schedule (yet).
        """
        return job_from(
            {
                "name": f"bench-{self.name}",
                "model": {"type": "gpt", "vocabulary": 256, "dropout": 0.0, "tie_embeddings": False, **self.model},
                "data": {"type": "bytes", "path": "stdlib"},
                "train": {
                    "steps": steps, "batch": self.batch, "optimizer": "adamw", "lr": 0.001, "seed": 0,
                    "dtype": "float32", "clip": None, "eval_batches": 1,
                },
                "parallel": {
                    "microbatch": self.microbatch, "chunks": 2 if schedule in CHUNKED else 1,
                    **({"schedule": "1f1b", "stages": 1, "replicas": DEVICES} if schedule in UNCUT
                       else {"schedule": schedule, "stages": DEVICES}),
                    **({"shard": ZERO3} if schedule == ZERO3 else {}),
                },
            }
        )  # fmt: skip


_SMALL = {"hidden": 64, "heads": 4, "sequence": 32}
_PLAIN = tuple(name for name in SHARED if name not in CHUNKED)

CASES = {
    case.name: case
    for case in (
        Case(
            "compute", "8 layers, hidden 256, sequence 128, 8 micro-batches of 4",
            {"layers": 8, "hidden": 256, "heads": 8, "sequence": 128}, 4, 8, SHARED, steps=5, warm_up=2, target=1.0,
        ),
        Case(
            "overhead", "2 layers, hidden 64, sequence 32, 16 micro-batches of 1",
            {"layers": 2, **_SMALL}, 1, 16, _PLAIN, steps=40, warm_up=8, target=0.85,
        ),
        Case(
            "overhead-chunked", "4 layers, hidden 64, sequence 32, 16 micro-batches of 1",
            {"layers": 4, **_SMALL}, 1, 16, CHUNKED, steps=40, warm_up=8, target=0.85,
        ),
        Case(
            DATA_PARALLEL, "no pipeline: 8 layers, hidden 256, sequence 128, 8 micro-batches of 4",
            {"layers": 8, "hidden": 256, "heads": 8, "sequence": 128}, 4, 8, tuple(UNCUT), steps=5, warm_up=2,
            target=1.0,
        ),
        Case(
            "gradients", "no pipeline: 6 layers, hidden 768, sequence 32, 2 micro-batches of 4: 170 MB of gradients",
            {"layers": 6, "hidden": 768, "heads": 12, "sequence": 32}, 4, 2, tuple(UNCUT), steps=7, warm_up=2,
            target=1.0,
        ),
    )
}  # fmt: skip
