"""What the planner computes for compiled layers of a described GPU, against the programs that a stage is cut into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.cost.profile import Profile
from raypipe.data import declared_fields
from raypipe.job.cluster import load_cluster
from raypipe.models import LayeredModel, build_model
from raypipe.partition.job_costs import divided_profile, job_profile
from tests.job_files import minimal_job
from tests.runtime.compiled.pieces import compiled_device

ROOT = Path(__file__).parents[3]
H100 = load_cluster(ROOT / "cluster" / "devices" / "h100.yaml")
SAMPLES, SEQUENCE = 2, 16
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "hidden": 64, "heads": 2, "sequence": SEQUENCE, "vocabulary": 320, "dropout": 0.0},
    "llama": {
        "hf": "llama", "sequence": SEQUENCE, "config": {
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 32, "intermediate_size": 96, "vocab_size": 260, "max_position_embeddings": 32,
        },
    },
}  # fmt: skip


def made_of(kind: str, dtype: str, **parallel: Any) -> tuple[LayeredModel, Any]:
    """A model and its job."""
    job = minimal_job(MODELS[kind], parallel={"microbatch": SAMPLES, **parallel}, dtype=dtype, compile="inductor")
    return build_model(job, declared_fields(job.data)), job


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_planned_bytes_are_those_of_the_cut(kind: str, dtype: str) -> None:
    """Of two blocks in one stage, and of the head: what is kept, and what is there for all weight gradients at once."""
    if kind != "gpt":
        pytest.importorskip("transformers")
    model, job = made_of(kind, dtype)
    profile: Profile = job_profile(job, H100)
    ids = torch.randint(256, (4, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": ids[:, :-1].contiguous(), "shift_labels": ids[:, 1:].contiguous()}
    stages = [range(1), range(1, model.count - 1), range(model.count - 1, model.count)]
    autocast = torch.bfloat16 if dtype == "bfloat16" else None
    _, traced, reports = compiled_device(model, stages, rows, torch.float32, SAMPLES, autocast=autocast)
    assert [report.reason for report in reports] == [None] * 3
    stream = profile.layers[0].output_bytes
    for stage, own in list(zip(traced, stages, strict=True))[1:]:
        ((_, _, cut),) = stage.parts
        layers = [profile.layers[i] for i in own]
        vectors = sum(4 * p.numel() for p in stage.module.parameters() if p.dim() == 1)
        operands = SAMPLES * sum(layer.operand_bytes or 0.0 for layer in layers)
        # In float32 the last block's own gradient is the one that has arrived, which the backward does not make.
        given = SAMPLES * stream if dtype == "float32" and len(own) > 1 else 0.0
        assert cut.operand_bytes == operands + vectors - given
        # What arrived is kept by whoever gave it. The first block keeps what is added to it, in 16 bits, not the sum.
        planned = SAMPLES * sum(layer.kept_bytes for layer in layers)
        less = SAMPLES * (stream / 2 if dtype == "bfloat16" and len(own) > 1 else 0.0)
        numbers = 16 * SAMPLES * SEQUENCE * len(own)  # of norms, attention and the loss: up to four a token
        assert abs(cut.kept_bytes + SAMPLES * stream - (planned - less)) <= numbers
        # At its end the program has these, and the gradient that it passes on.
        assert all(layer.workspace_bytes >= (layer.operand_bytes or 0.0) + layer.output_bytes for layer in layers)


def test_layers_that_devices_share_are_planned_compiled_too() -> None:
    _, eager = made_of("gpt", "float32", tensor=2)
    eager = eager.model_copy(update={"train": eager.train.model_copy(update={"compile": "none"})})
    _, compiled = made_of("gpt", "float32", tensor=2)
    one = divided_profile(eager, H100, 2)
    for halves in (False, True):  # halves of a micro-batch run eagerly
        block = divided_profile(compiled, H100, 2, halves).layers[1]
        assert (block.operand_bytes is None) is halves
        assert halves or block.times[64].forward < one.layers[1].times[64].forward
    stream = 4.0 * SEQUENCE * 64
    assert divided_profile(compiled, H100, 2).layers[1].operand_bytes == (3 + 4) / 2 * stream + 2 * stream
