"""Losses that the model computes itself, against the eager model that accumulates gradients; float64, 1e-9."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.errors import SpecError
from raypipe.job import JobSpec
from raypipe.job.spec import job_from
from raypipe.models import build_model
from raypipe.models.own_loss import OwnLoss
from raypipe.models.task import NextToken
from tests.capture.models import GROUPED, SMALL
from tests.runtime.runs.eager_reference import with_values
from tests.runtime.runs.one_device import even_cut, run_step
from tests.runtime.runs.test_any_model import BATCH, fields_of, tokens

HERE = "tests.runtime.runs.test_own_loss"
MICROBATCH = 2


class Penalised(nn.Module):
    """Label smoothing, and a term that is no sum over samples."""

    def __init__(self, returns: str = "dict", takes: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(6, 3)
        self.returns = returns
        if not takes:
            self.forward = self.predict  # type: ignore[method-assign]

    def predict(self, features: Tensor) -> Tensor:
        for block in self.blocks:
            features = block(features)
        return self.last(features)

    def forward(self, features: Tensor, labels: Tensor) -> Any:
        spread = features.new_zeros(())
        for block in self.blocks:
            features = block(features)
            spread = spread + features.mean(0).square().sum() * features.std()
        logits = self.last(features)
        loss = F.cross_entropy(logits, labels, label_smoothing=0.1) + 0.3 * spread
        return {"dict": {"logits": logits, "loss": loss}, "logits": {"logits": logits}}[self.returns]


ROWS = {"features": torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64),
        "labels": torch.tensor([0, 1, 2, 0, 1, 2])}  # fmt: skip
MIXTRAL = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
           "router_aux_loss_coef": 0.5}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "a module's own": ({"import": f"{HERE}:Penalised"}, ROWS),
    "mixtral": ({"hf": "mixtral", "config": MIXTRAL}, tokens()),
    "bert": ({"hf": "bert", "config": {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}},
             tokens()),
}  # fmt: skip


def job_of(model: dict[str, Any], **parallel: Any) -> JobSpec:
    return job_from(
        {
            "name": "own", "model": {"loss": "model", **model}, "data": {"type": "arrays", "path": "unused.npz"},
            "train": {"steps": 1, "batch": BATCH, "dtype": "float64"}, "parallel": {"microbatch": 2, **parallel},
        }
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_gradient_accumulation(case: str) -> None:
    spec, rows = CASES[case]
    if "hf" in spec:
        pytest.importorskip("transformers")
    model = build_model(job_of(spec), fields_of(rows))
    assert model.count >= 3  # an auxiliary loss does not tie the blocks together
    for stages, split in ((2, False), (3, True)):
        outcome = run_step(model, even_cut(model, stages), rows, torch.float64, MICROBATCH, split=split)
        values = {n: v.detach() + outcome.gradients[n] for stage in outcome.stages for n, v in stage.named.items()}
        module = with_values(model.values.build(), values)
        if case == "mixtral":  # the library's plain loop over experts, which nothing can capture
            module.set_experts_implementation("eager")
        total = 0.0
        for first in range(0, BATCH, MICROBATCH):
            found = module(**{name: t[first : first + MICROBATCH] for name, t in rows.items()})
            loss = found["loss"]
            (loss * MICROBATCH / BATCH).backward()
            total += loss.item() * MICROBATCH / BATCH
            if case == "mixtral":
                assert found.aux_loss > 0.1
        assert outcome.loss == pytest.approx(total, abs=1e-9, rel=0)
        for name, p in module.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(outcome.gradients[name], p.grad, rtol=0, atol=1e-9, msg=name)


def test_text_gives_labels_that_the_model_shifts() -> None:
    made = OwnLoss(NextToken(), ("labels",)).from_text(torch.arange(18).view(2, 9), [0, 1])
    assert set(made) == {"input_ids", "labels"}
    assert torch.equal(made["labels"], made["input_ids"])
    assert made["labels"].shape == (2, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "why"), [({"takes": False}, "takes no labels"), ({"returns": "logits"}, r'"logits", float64 of shape \[')]
)
def test_a_model_without_a_loss_is_refused_with_what_to_do(args: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why) as caught:
        build_model(job_of({"import": f"{HERE}:Penalised", "args": args}), fields_of(ROWS))
    assert caught.value.where == "model.loss"
    assert caught.value.fix


def test_a_divided_model_has_no_loss_of_its_own() -> None:
    with pytest.raises(SpecError, match="cannot be divided"):
        job_of({"import": f"{HERE}:Penalised"}, tensor=2)
