"""Attention residuals (Kimi Team 2026, arXiv:2603.15031): later stages read the outputs of earlier ones.

Sums of residuals are replaced by attention over depth: every sublayer reads a weighted mean of the token embedding, of
the sums of the blocks that are complete, and of the open block's own sum. So each stage needs what all stages before it
made, which a pipeline that hands on one hidden state cannot express.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.models import LayeredModel, build_model
from tests.runtime.runs.eager_reference import assert_step_of, eager_training
from tests.runtime.runs.one_device import even_cut, run_step
from tests.runtime.runs.small_runs import drive, job_for

WIDTH, HEADS, CLASSES, SEQUENCE = 16, 2, 257, 16
MODEL = {"import": f"{__name__}:AttentionResiduals", "task": "causal-lm", "sequence": SEQUENCE}


class DepthAttention(nn.Module):
    """Mean of the sources, weighted per token by softmax(w . RMSNorm(source)); a query w of its own for each reader."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.norm = nn.Parameter(torch.randn(WIDTH)), nn.RMSNorm(WIDTH)

    def forward(self, sources: list[Tensor]) -> Tensor:
        values = torch.stack(sources)
        weights = (self.norm(values) @ self.query).softmax(0)
        return (weights.unsqueeze(-1) * values).sum(0)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Sublayer(nn.Module):
    def __init__(self, work: nn.Module) -> None:
        super().__init__()
        self.read, self.norm, self.work = DepthAttention(), nn.RMSNorm(WIDTH), work

    def forward(self, sources: list[Tensor]) -> Tensor:
        return self.work(self.norm(self.read(sources)))


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class AttentionResiduals(nn.Module):
    """A causal language model; a block is ``depth`` sublayers, alternately attention and feed-forward."""

    def __init__(self, blocks: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(CLASSES, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(
            nn.ModuleList(Sublayer(feed_forward() if i % 2 else SelfAttention()) for i in range(depth))
            for _ in range(blocks)
        )
        self.read, self.head = DepthAttention(), nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor) -> Tensor:
        sources = [self.embed(input_ids) + self.places.weight[: input_ids.shape[1]]]
        for block in self.blocks:
            open_block: list[Tensor] = []
            for sublayer in block:
                made = sublayer([*sources, *open_block])
                open_block = [open_block[0] + made] if open_block else [made]
            sources += open_block
        return self.head(self.read(sources))


def loss_of(module: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(module(rows["input_ids"]).flatten(0, 1), rows["shift_labels"].flatten())


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "split"), [(2, False), (4, True)])
def test_loss_and_gradients_are_the_whole_models(stages: int, split: bool) -> None:
    ids = torch.randint(CLASSES, (6, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    rows = {"input_ids": ids[:, :-1], "shift_labels": ids[:, 1:]}
    job = job_for(MODEL, {"type": "bytes", "path": "stdlib"}, {"stages": stages})
    model: LayeredModel = build_model(job, None)
    cut = even_cut(model, stages)
    outcome = run_step(model, cut, rows, torch.float64, 2, split=split)
    assert_step_of(outcome, model, lambda whole: loss_of(whole, rows))


@pytest.mark.runs
def test_two_stages_a_device_train_as_one_process(stage_pool, text_folder, tmp_path: Path) -> None:
    job = job_for(MODEL, text_folder, {"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2}, clip=0.5)
    done = drive(job, stage_pool, tmp_path)
    assert done.losses == pytest.approx(eager_training(job, tmp_path / "data", loss_of)[0], abs=1e-9, rel=0)
