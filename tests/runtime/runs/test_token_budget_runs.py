"""Packed documents by token budget, through real stage actors: the loss curve of one process that has each alone.

The loop takes the same documents one at a time, with PyTorch alone; of raypipe it has their order and the start values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raypipe.checkpoint import open_checkpoint
from raypipe.data import Arrays, Ragged, flat
from raypipe.data.sample_order import Split, order_key, permuted
from raypipe.job import JobSpec
from tests.exhaustive import exhaustive
from tests.experts.families import FAMILIES as EXPERTS
from tests.runtime.runs.eager_reference import as_started
from tests.runtime.runs.plain_training import whole_batch_losses
from tests.runtime.runs.small_runs import drive, job_for

PreTrainedModel = pytest.importorskip("transformers").PreTrainedModel
pytestmark = pytest.mark.runs
STEPS, TOKENS = 4, 120
LLAMA = {
    "vocab_size": 90, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b", "stages": 2},
    "1f1b of two copies": {"schedule": "1f1b", "stages": 1, "replicas": 2},
    "zb-h1": {"schedule": "zb-h1", "stages": 2},
    "zb-h1 of two copies": {"schedule": "zb-h1", "stages": 2, "replicas": 2},
    "chimera": {"schedule": "chimera", "stages": 2},
    "chimera of two copies": {"schedule": "chimera", "stages": 2, "replicas": 2},
    "two rows a micro-batch": {"schedule": "1f1b", "stages": 2, "microbatch": 2},
}


def documents(path: Path) -> Path:
    """40 documents of 2 to 40 tokens, most of them short."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(3, 90, int(n)) for n in np.clip(draw.lognormal(2.2, 0.8, 40), 2, 40)]
    np.savez(path, **flat({"input_ids": Ragged.of(rows), "labels": Ragged.of(rows)}))
    return path


DIVIDED: dict[str, dict[str, Any]] = {
    "two copies": {"schedule": "1f1b", "stages": 2, "replicas": 2, "context": 2},
    "four copies": {"schedule": "1f1b", "stages": 1, "replicas": 4, "context": 4},
    "two groups of two": {"schedule": "zb-h1", "stages": 2, "replicas": 4, "context": 2},
    "two rows": {"schedule": "1f1b", "stages": 2, "replicas": 2, "context": 2, "microbatch": 2},
    "recomputed": {"schedule": "chimera", "stages": 2, "replicas": 2, "context": 2, "recompute": "full"},
    "divided head": {"schedule": "1f1b", "stages": 2, "replicas": 2, "context": 2, "vocabulary": "split"},
}
"""Plans whose copies divide rows."""
SHARED: dict[str, dict[str, Any]] = {
    "experts": {"schedule": "1f1b", "stages": 1, "replicas": 2, "experts": 2},
    "experts of two stages": {"schedule": "zb-h1", "stages": 2, "replicas": 2, "experts": 2},
}
"""Plans whose copies divide experts."""


def packed_job(
    path: Path, plan: str, row_tokens: int = 40, model: dict[str, Any] | None = None, **train: Any
) -> JobSpec:
    keys = {"microbatch": 1, **(PLANS | DIVIDED | SHARED | {"alone": {"schedule": "1f1b", "stages": 1}})[plan]}
    given = {
        "steps": STEPS,
        "batch": None,
        "clip": 0.5,
        "tokens_per_step": TOKENS,
        "microbatch_tokens": row_tokens,
        **train,
    }
    data = {"type": "arrays", "path": str(path), "pad_to_multiple_of": 4}
    return job_for(model or {"hf": "llama", "config": LLAMA}, data, keys, **given)


def steps_of(lengths: list[int], split: Split, seed: int) -> list[list[int]]:
    """The documents of each step: the next ones of the shuffled epochs, as many as fit."""
    result: list[list[int]] = []
    left, epoch, place = 0, 0, 0
    while True:
        document = permuted(order_key(split, seed, epoch), len(lengths), place)
        if lengths[document] > left or not result:
            if len(result) == STEPS:
                return result
            result.append([])
            left = TOKENS
        result[-1].append(document)
        left -= lengths[document]
        epoch, place = (epoch, place + 1) if place + 1 < len(lengths) else (epoch + 1, 0)


def one_process(job: JobSpec, data: Path) -> list[float]:
    """Losses of each step, then the held-out one: each document by itself, and the mean over all their tokens."""
    module, _ = as_started(job, data)
    assert isinstance(module, PreTrainedModel)
    module.set_experts_implementation("eager")  # its grouped products know no float64
    prepared = Arrays.open(data)

    def loss_of(split: Split, step: int) -> Tensor:
        column = prepared.columns[split]["input_ids"]
        assert isinstance(column, Ragged)
        chosen = steps_of(column.lengths().tolist(), split, job.train.seed if split == "train" else 0)[step]
        total, count = torch.zeros((), dtype=torch.float64), 0
        for number in chosen:
            ids = torch.from_numpy(column.values[column.offsets[number] : column.offsets[number + 1]].astype(np.int64))
            logits = module(input_ids=ids[None], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits[:-1], ids[1:], reduction="sum")
            count += len(ids) - 1
        return total / count

    return whole_batch_losses(job, module, loss_of)


@pytest.mark.parametrize(
    "plan",
    ["zb-h1", "chimera of two copies", *exhaustive(*(p for p in PLANS if p not in ("zb-h1", "chimera of two copies")))],
)
def test_packed_documents_train_as_each_alone(plan, stage_pool, tmp_path) -> None:
    chunks = {"loss_chunk_tokens": 7} if plan == "zb-h1" else {}
    job = packed_job(documents(tmp_path / "rows.npz"), plan, **chunks)
    done = drive(job, stage_pool, tmp_path / "run")
    right = one_process(job, tmp_path / "run" / "data")
    assert [*done.losses, *done.val_losses] == pytest.approx(right, abs=1e-9, rel=0)
    orders = done.driver._orders.of(done.driver.running, range(STEPS), 0, None)
    assert orders or plan == "1f1b of two copies"  # one stage: any order takes as long


def test_a_run_goes_on_with_other_copies_and_rows(stage_pool, tmp_path) -> None:
    """Two steps of 1F1B with rows of 40 tokens, then two of Chimera in two copies with rows of 64."""
    path = documents(tmp_path / "rows.npz")
    first = packed_job(path, "1f1b", checkpoint_every=2)
    begun = drive(first, stage_pool, tmp_path / "first")
    second = packed_job(path, "chimera of two copies", 64)
    assert second.train.batch != first.train.batch
    rest = drive(second, stage_pool, tmp_path / "second", begun.checkpoints[2], 2)
    right = one_process(first, tmp_path / "first" / "data")
    assert begun.losses == pytest.approx(right[:4], abs=1e-9, rel=0)
    assert [*rest.losses, *rest.val_losses] == pytest.approx(right[2:], abs=1e-9, rel=0)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"hf": "llama", "config": {**LLAMA, "num_key_value_heads": 1}},
    "qwen3": {"hf": "qwen3", "config": {**LLAMA, "head_dim": 8}},
    "gpt2": {"hf": "gpt2", "config": {"vocab_size": 90, "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64,
                                      "attn_pdrop": 0.0}},
}  # fmt: skip
"""Heads of keys that queries share; the last drops activations and residuals."""


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("llama", "two copies"),
        *exhaustive(
            ("llama", "four copies"),
            ("llama", "two groups of two"),
            ("qwen3", "two rows"),
            ("llama", "recomputed"),
            ("llama", "divided head"),
            ("gpt2", "four copies"),
        ),
    ],
)
def test_copies_divide_rows_of_documents(model, plan, stage_pool, tmp_path) -> None:
    """Losses, norms and parameters of one process; then other copies go on, and take over from it."""
    path = documents(tmp_path / "rows.npz")
    divided = packed_job(path, plan, model=MODELS[model], checkpoint_every=2)
    whole = packed_job(path, "alone", model=MODELS[model], checkpoint_every=2)
    alone = drive(whole, stage_pool, tmp_path / "alone")
    done = drive(divided, stage_pool, tmp_path / "divided")
    if model == "llama":
        right = one_process(divided, tmp_path / "divided" / "data")
        assert [*done.losses, *done.val_losses] == pytest.approx(right, abs=1e-9, rel=0)
    for key in ("loss", "grad_norm"):
        expected = [row[key] for row in alone.rows]
        assert [row[key] for row in done.rows] == pytest.approx(expected, abs=1e-9, rel=0)
    assert done.val_losses == pytest.approx(alone.val_losses, abs=1e-9, rel=0)
    saved, same = (open_checkpoint(run.checkpoints[STEPS]) for run in (done, alone))
    assert saved.keys == same.keys
    values = same.read(same.keys)
    for key, value in saved.read(saved.keys).items():
        torch.testing.assert_close(value, values[key], rtol=0, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")
    tokens = 40 if model == "gpt2" else 64  # dropout is drawn by row
    for after, begun in (("zb-h1", done), (plan, alone)):
        job = packed_job(path, after, tokens, MODELS[model])
        rest = drive(job, stage_pool, tmp_path / f"after {id(begun)}", begun.checkpoints[2], 2)
        assert rest.losses == pytest.approx(alone.losses[2:], abs=1e-9, rel=0)


@pytest.mark.parametrize("plan", ["experts", *exhaustive("experts of two stages")])
def test_copies_divide_the_experts_of_packed_rows(plan, stage_pool, tmp_path) -> None:
    """Tokens of all documents travel together; losses are those of one process that has each document alone."""
    model = {"hf": "qwen3_moe", "config": {**EXPERTS["qwen3_moe"], "vocab_size": 90, "max_position_embeddings": 64}}
    path = documents(tmp_path / "rows.npz")
    done = drive(packed_job(path, plan, model=model), stage_pool, tmp_path / "run")
    right = one_process(packed_job(path, "alone", model=model), tmp_path / "run" / "data")
    assert [*done.losses, *done.val_losses] == pytest.approx(right, abs=1e-9, rel=0)


def test_copies_divide_rows_that_were_packed_before(stage_pool, tmp_path) -> None:
    """Two documents a row, told by positions that restart; one copy is the same run without the division."""
    draw = np.random.default_rng(0)
    ids = draw.integers(3, 90, (40, 24))
    positions = [np.concatenate([np.arange(n), np.arange(24 - n)]) for n in draw.integers(2, 22, 40)]
    np.savez(tmp_path / "rows.npz", input_ids=ids, labels=ids, position_ids=np.stack(positions))
    losses = []
    for keys in ({"replicas": 1}, {"replicas": 2, "context": 2}):
        plan = {"schedule": "1f1b", "stages": 1, "microbatch": 2, **keys}
        job = job_for({"hf": "llama", "config": LLAMA}, tmp_path / "rows.npz", plan)
        done = drive(job, stage_pool, tmp_path / f"{len(losses)}")
        losses.append([*done.losses, *done.val_losses])
    assert losses[0] == pytest.approx(losses[1], abs=1e-9, rel=0)
