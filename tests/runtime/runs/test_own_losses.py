"""Losses that look at values, and those that the model computes itself, against the eager model; float64, 1e-9."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raypipe.errors import CaptureError, SpecError
from raypipe.job import JobSpec
from raypipe.models import build_model
from raypipe.models.losses import OwnLoss
from raypipe.models.task import NextToken
from tests.capture.models import GROUPED, SMALL
from tests.exhaustive import exhaustive
from tests.runtime.runs.eager_reference import assert_step_of
from tests.runtime.runs.one_device import even_cut, run_step
from tests.runtime.runs.small_runs import job_for
from tests.runtime.runs.test_any_model import fields_of, tokens
from tests.runtime.runs.test_loss_functions import BATCH, check_run, job_of

HERE = "tests.runtime.runs.test_own_losses"
SLOTS, KINDS, MOST = 4, 3, 3
Batch = Mapping[str, Tensor]


@dataclass
class Found:
    """What a detector returns; no class that torch's pytrees know."""

    logits: Tensor
    pred_boxes: Tensor


class Detector(nn.Module):
    """A small detector of ``SLOTS`` boxes, the last kind being none."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.slots = nn.Parameter(torch.randn(SLOTS, 8))
        self.blocks = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))
        self.kinds, self.boxes = nn.Linear(8, KINDS + 1), nn.Linear(8, 4)

    def forward(self, pixel_values: Tensor) -> Found:
        seen = self.patches(pixel_values).flatten(2).transpose(1, 2)
        x = self.slots.expand(len(pixel_values), -1, -1)
        for block in self.blocks:
            x = x + block(x, seen, seen)[0]
        return Found(self.kinds(x), self.boxes(x).sigmoid())


def pictures() -> dict[str, Tensor]:
    """Images with one to three boxes: kind and four numbers; -1 is padding."""
    draw = torch.Generator().manual_seed(4)
    labels = torch.rand(BATCH, MOST, 5, generator=draw, dtype=torch.float64)
    labels[..., 0] = torch.randint(KINDS, (BATCH, MOST), generator=draw).double()
    for row, count in enumerate((1, 3, 2, 3, 1, 2)):
        labels[row, count:] = -1
    return {"pixel_values": torch.randn(BATCH, 3, 8, 8, generator=draw, dtype=torch.float64), "labels": labels}


def matched(model: Any, batch: Batch, weight: float = 5.0) -> Tensor:
    """DETR's loss: each box goes to the slot that finds it best, the cheapest assignment of all; one loss a sample."""
    result = model(pixel_values=batch["pixel_values"])
    losses = []
    for row in range(len(result.logits)):
        wanted = batch["labels"][row][batch["labels"][row, :, 0] >= 0]
        cost = -result.logits[row].softmax(-1)[:, wanted[:, 0].long()]
        cost = (cost + weight * torch.cdist(result.pred_boxes[row], wanted[:, 1:].to(cost.dtype), p=1)).detach().numpy()
        slots = min(
            permutations(range(len(cost)), len(wanted)),
            key=lambda chosen: sum(cost[s, b] for b, s in enumerate(chosen)),
        )
        kinds = torch.full((len(cost),), KINDS)
        kinds[list(slots)] = wanted[:, 0].long()
        each = F.cross_entropy(result.logits[row], kinds)
        losses.append(each + weight * (result.pred_boxes[row, list(slots)] - wanted[:, 1:]).abs().mean())
    return torch.stack(losses)


def over_all(model: Any, batch: Batch) -> Tensor:
    """As DETR's, a mean over the boxes of the micro-batch."""
    return matched(model, batch).sum() / (batch["labels"][..., 0] >= 0).sum()


def twice(model: Any, batch: Batch) -> Tensor:
    first = model(batch["pixel_values"])
    return first.logits.mean((1, 2)) if float(first.logits.detach().sum()) > 1e9 else model(batch["pixel_values"])[0]


def by_weight(model: Any, batch: Batch) -> Tensor:
    result = model(batch["pixel_values"])
    return result.logits.mean((1, 2)) * float(model.slots.detach().mean())


def detr() -> nn.Module:
    """transformers' DETR, with a tiny ResNet below."""
    transformers = pytest.importorskip("transformers")
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False, backbone=None, use_pretrained_backbone=False, backbone_config=backbone,
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, num_queries=SLOTS, num_labels=KINDS, dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config)


def yolos() -> nn.Module:
    """transformers' YOLOS."""
    transformers = pytest.importorskip("transformers")
    config = transformers.YolosConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=[8, 8],
        patch_size=4, num_detection_tokens=SLOTS, num_labels=KINDS,
    )  # fmt: skip
    return transformers.YolosForObjectDetection(config)


def by_microbatch(model: nn.Module, rows: Batch) -> Tensor:
    parts = [over_all(model, {n: t[i : i + 2] for n, t in rows.items()}) for i in range(0, BATCH, 2)]
    return torch.stack(parts).mean()


Case = tuple[dict[str, Any], Callable[[Any, Batch], Tensor]]
CASES: dict[str, Case] = {
    "a detector": ({"import": f"{HERE}:Detector", "loss": f"{HERE}:matched", "loss_args": {"weight": 2.0}},
                   lambda model, rows: matched(model, rows, 2.0).mean()),
    "over a micro-batch": ({"import": f"{HERE}:Detector", "loss": f"{HERE}:over_all", "loss_per": "microbatch"},
                           by_microbatch),
    "YOLOS": ({"import": f"{HERE}:yolos", "loss": f"{HERE}:matched"}, lambda model, rows: matched(model, rows).mean()),
    "DETR": ({"import": f"{HERE}:detr", "loss": f"{HERE}:matched"}, lambda model, rows: matched(model, rows).mean()),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", ["a detector", *exhaustive(*(name for name in CASES if name != "a detector"))])
def test_matched_boxes_have_the_loss_and_gradients_of_the_eager_model(case, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE_DIR", str(tmp_path))  # it is said when a model is captured
    spec, plain = CASES[case]
    rows = pictures()
    model = build_model(job_of(spec), fields_of(rows))
    assert "the loss function runs as it is, on the last stage" in capsys.readouterr().err
    assert model.count >= 3
    for stages, split in ((2, False), (3, True)):
        outcome = run_step(model, even_cut(model, stages), rows, torch.float64, 2, split=split)
        assert_step_of(outcome, model, lambda whole: plain(whole, rows))


@pytest.mark.parametrize(
    ("name", "why"), [("twice", "calls the model more than once"), ("by_weight", "reads slots of the model")]
)
def test_what_cannot_run_behind_the_model_is_refused(name: str, why: str) -> None:
    with pytest.raises(CaptureError) as caught:
        build_model(job_of({"import": f"{HERE}:Detector", "loss": f"{HERE}:{name}"}), fields_of(pictures()))
    assert why in str(caught.value)
    assert caught.value.fix


@pytest.mark.runs
def test_a_run_of_stage_actors_has_the_losses_of_a_plain_loop(stage_pool, tmp_path) -> None:
    spec, plain = CASES["a detector"]
    check_run(stage_pool, tmp_path, spec, pictures(), plain, schedule="zb-h1", stages=2)


# Losses that the model computes itself, against the eager model that accumulates gradients; float64, 1e-9.

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
OWN_CASES: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "a module's own": ({"import": f"{HERE}:Penalised"}, ROWS),
    "mixtral": ({"hf": "mixtral", "config": MIXTRAL}, tokens()),
    "bert": ({"hf": "bert", "config": {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}},
             tokens()),
}  # fmt: skip


def own_job(model: dict[str, Any], **parallel: Any) -> JobSpec:
    return job_for({"loss": "model", **model}, "unused.npz", parallel, steps=1, batch=BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("case", OWN_CASES)
def test_loss_and_gradients_are_those_of_gradient_accumulation(case: str) -> None:
    spec, rows = OWN_CASES[case]
    if "hf" in spec:
        pytest.importorskip("transformers")
    model = build_model(own_job(spec), fields_of(rows))
    assert model.count >= 3  # an auxiliary loss does not tie the blocks together

    def accumulated(module: Any) -> Tensor:
        if case == "mixtral":  # the library's plain loop over experts, which nothing can capture
            module.set_experts_implementation("eager")
        firsts = range(0, BATCH, MICROBATCH)
        result = [module(**{name: t[first : first + MICROBATCH] for name, t in rows.items()}) for first in firsts]
        assert case != "mixtral" or all(one.aux_loss > 0.1 for one in result)
        return torch.stack([one["loss"].double() for one in result]).mean()  # the library's own is of float32

    for stages, split in ((2, False), (3, True)):
        outcome = run_step(model, even_cut(model, stages), rows, torch.float64, MICROBATCH, split=split)
        assert_step_of(outcome, model, accumulated)


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
        build_model(own_job({"import": f"{HERE}:Penalised", "args": args}), fields_of(ROWS))
    assert caught.value.where == "model.loss"
    assert caught.value.fix


def test_a_divided_model_has_no_loss_of_its_own() -> None:
    with pytest.raises(SpecError, match="cannot be divided"):
        own_job({"import": f"{HERE}:Penalised"}, tensor=2)
