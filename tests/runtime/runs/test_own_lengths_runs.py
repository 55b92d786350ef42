"""Samples of their own lengths, through real stage actors: the loss curve of a plain loop over whole mini-batches.

The loop pads, averages and updates with PyTorch alone; of raypipe it has the order of the samples and the start values.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raypipe.data import Arrays, Ragged, flat
from raypipe.job import JobSpec
from raypipe.models import random_keys
from tests.capture.models import FAMILIES
from tests.exhaustive import exhaustive
from tests.runtime.runs.eager_reference import as_started
from tests.runtime.runs.plain_training import whole_batch_losses, whole_gpt
from tests.runtime.runs.small_runs import drive, job_for

pytestmark = pytest.mark.runs
STEPS, BATCH = 3, 8
TEXT = (
    """import antigravity
def fly(height: float) -> None:

    for metre in range(int(height)):
        print("up", metre)
x = 1
    return
""".splitlines()
    * 4
)


make_job = partial(job_for, steps=STEPS, batch=BATCH, clip=0.5)


def filled(rows: list[list[int]], fill: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


def lines_losses(job: JobSpec, data: Path) -> list[float]:
    """Each line predicts its next byte, and a NUL behind the last one."""
    module = whole_gpt(job)
    lines = [line.encode() for line in TEXT if line]
    prepared = Arrays.open(data, "lines.json")
    assert sum(prepared.rows(split) for split in ("train", "val")) == len(lines)
    kept = {}
    for split in ("train", "val"):
        column = prepared.columns[split]["line"]
        kept[split] = [bytes(column.values[a:b]) for a, b in zip(column.offsets, column.offsets[1:], strict=False)]
    assert sorted(kept["train"] + kept["val"]) == sorted(lines)

    def loss_of(split: str, step: int) -> Tensor:
        chosen = [list(kept[split][i]) for i in prepared.places(split, job.train.seed, step, BATCH)]
        with random_keys(job.train.seed, step, range(BATCH), training=split == "train"):
            logits = module(filled(chosen, 0))
        return F.cross_entropy(logits.flatten(0, 1), filled([[*line[1:], 0] for line in chosen], -100).flatten())

    return whole_batch_losses(job, module, loss_of)


GPT = {"type": "gpt", "layers": 4, "hidden": 16, "heads": 2, "sequence": 40, "dropout": 0.1}
PLANS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b", "stages": 2},
    "gpipe over gloo, replicas": {"schedule": "gpipe", "stages": 2, "replicas": 2, "transport": "gloo"},
    "zb-h1 over ray-collective": {"schedule": "zb-h1", "stages": 2, "transport": "ray-collective"},
    "chimera": {"schedule": "chimera", "stages": 2},
    "chimera, paired forwards": {"schedule": "chimera", "stages": 2, "concat": "doubling", "microbatch": 1},
    "positions over ranks": {"schedule": "zb-h1", "stages": 2, "tensor": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("plan", [*list(PLANS)[1:3], *list(PLANS)[4:], *exhaustive("1f1b", "chimera")])
def test_lines_of_text(plan, stage_pool, tmp_path) -> None:
    (tmp_path / "text.py").write_text("\n".join(TEXT))
    job = make_job(GPT, {"type": "lines", "path": str(tmp_path / "text.py"), "pad_to_multiple_of": 4}, PLANS[plan])
    done = drive(job, stage_pool, tmp_path / "run")
    losses = lines_losses(job, tmp_path / "run" / "data")
    assert [*done.losses, *done.val_losses] == pytest.approx(losses, abs=1e-9, rel=0)
    lengths = Arrays.open(tmp_path / "run" / "data", "lines.json").columns["train"]["line"].lengths()
    tokens = [row["tokens_per_s"] * row["step_s"] for row in done.rows]
    assert tokens == pytest.approx([BATCH * lengths.mean()] * STEPS)  # what pads them is no throughput


def rows_of(case: str) -> dict[str, list[list[int]]]:
    """40 rows of 1 to 14 tokens; labels where the task has its own."""
    draw = np.random.default_rng(0)
    rows = {"input_ids": [draw.integers(3, 90, n).tolist() for n in draw.integers(2, 15, 40)]}
    if case == "t5":
        rows["labels"] = [draw.integers(3, 90, n).tolist() for n in draw.integers(1, 10, 40)]
    elif case == "bert":
        rows["labels"] = [[t if draw.random() < 0.5 else -100 for t in row] for row in rows["input_ids"]]
    else:
        rows["labels"] = [list(row) for row in rows["input_ids"]]
    return rows


def model_losses(job: JobSpec, data: Path, case: str) -> list[float]:
    """The library's own model on the whole mini-batch; its own mean loss, but for GPT-2, where that is in float32."""
    module, _ = as_started(job, data)
    prepared = Arrays.open(data)

    def loss_of(split: str, step: int) -> Tensor:
        places = prepared.places(split, job.train.seed, step, BATCH)
        rows = {}
        for name in ("input_ids", "labels"):
            column = prepared.columns[split][name]
            rows[name] = [column.values[column.offsets[i] : column.offsets[i + 1]].tolist() for i in places]
        tokens, labels = filled(rows["input_ids"], 0), filled(rows["labels"], -100)
        mask = filled([[1] * len(row) for row in rows["input_ids"]], 0)
        output = module(input_ids=tokens, attention_mask=mask, labels=labels)
        if case != "gpt2":
            return output.loss
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return whole_batch_losses(job, module, loss_of)


DROPOUT = {
    "gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "t5": ("dropout_rate",),
}
CASES = {
    "gpt2": {"schedule": "zb-h1", "stages": 2, "replicas": 2},
    "bert": {"schedule": "1f1b", "stages": 2, "tensor": 2, "sequence_parallel": True},
    "t5": {"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2, "microbatch": 1},
}


@pytest.mark.parametrize("case", ["gpt2", "t5", *exhaustive("bert")])
def test_models_with_masks(case, stage_pool, tmp_path) -> None:
    pytest.importorskip("transformers")
    columns = {name: Ragged.of([np.array(row) for row in rows]) for name, rows in rows_of(case).items()}
    np.savez(tmp_path / "rows.npz", **flat(columns))
    spec = {"hf": case, "config": {**FAMILIES[case], **dict.fromkeys(DROPOUT[case], 0.0)}}
    job = make_job(spec, {"type": "arrays", "path": str(tmp_path / "rows.npz")}, CASES[case])
    done = drive(job, stage_pool, tmp_path / "run")
    losses = model_losses(job, tmp_path / "run" / "data", case)
    assert [*done.losses, *done.val_losses] == pytest.approx(losses, abs=1e-9, rel=0)
