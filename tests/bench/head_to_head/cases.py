"""What is measured: a model bound by arithmetic, small ones bound by all else, and the schedules both sides know."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
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
EXPERTS = "experts"
"""No pipeline: two copies of a mixture-of-experts model, which divide its experts. torch's side is a loop of its
all-to-all and DistributedDataParallel."""
UNCUT = {DATA_PARALLEL: "ddp", ZERO3: "fsdp2", EXPERTS: "ep"}
"""What torch's side is asked for (``blocks.Order.kind``) where there is no pipeline."""
PEERS = {"fsdp2": (EXPERTS,), "deepspeed": ("1f1b", DATA_PARALLEL, ZERO3), "accelerate": (DATA_PARALLEL,)}
"""What else takes a turn, and at which schedules. DeepSpeed's pipeline engine knows 1F1B alone. accelerate has no
pipeline that trains, and no FSDP on CPUs: it takes the plugin and trains whole copies."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model and mini-batch."""

    name: str
    about: str
    model: dict[str, Any]
    """Of raypipe's GPT; or the ``config`` of a transformers model, and the ``sequence``."""
    microbatch: int
    microbatches: int
    schedules: tuple[str, ...]
    steps: int
    """Steps of a block: one contender's turn in a round."""
    warm_up: int
    """Steps at the start of a block that are left out."""
    target: float
    """Largest raypipe / torch that the project wants to see here."""

    def in_folder(self, folder: Path) -> Case:
        """Write the start weights of a transformers model, from which all contenders read it; of others, nothing."""
        if "config" not in self.model:
            return self
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        where = folder / f"model-{self.name}"
        config = dict(self.model["config"])
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(where)
        return replace(self, model={"hf": str(where), "sequence": self.model["sequence"]})

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
                "model": self.model if "hf" in self.model else {**GPT, **self.model},
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
                    **({"experts": DEVICES} if schedule == EXPERTS else {}),
                },
            }
        )  # fmt: skip


GPT = {"type": "gpt", "vocabulary": 256, "dropout": 0.0, "tie_embeddings": False}
_COPIES = (DATA_PARALLEL, ZERO3)
_SMALL = {"hidden": 64, "heads": 4, "sequence": 32}
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 256, "output_router_logits": False,
}  # fmt: skip
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
            {"layers": 8, "hidden": 256, "heads": 8, "sequence": 128}, 4, 8, _COPIES, steps=5, warm_up=2,
            target=1.0,
        ),
        Case(
            "gradients", "no pipeline: 6 layers, hidden 768, sequence 32, 2 micro-batches of 4: 170 MB of gradients",
            {"layers": 6, "hidden": 768, "heads": 12, "sequence": 32}, 4, 2, _COPIES, steps=7, warm_up=2,
            target=1.0,
        ),
        Case(
            EXPERTS, "no pipeline: Mixtral, 4 layers, hidden 256, 8 experts of 512, sequence 128, 4 micro-batches of 4",
            {"config": MIXTRAL, "sequence": 128}, 4, 4, (DATA_PARALLEL, EXPERTS), steps=5, warm_up=2, target=1.0,
        ),
    )
}  # fmt: skip
