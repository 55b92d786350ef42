"""Model instances as they are: modules of the script, frozen and edited ones, losses of the script."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.trainer.three_steps import assert_alike, hugging_face, pipelined, plain, rows_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROWS = rows_of()
BATCH = {name: torch.tensor([row[name] for row in ROWS]) for name in ROWS[0]}


def bert(drop: float = 0.0) -> Any:
    transformers.set_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=drop, attention_probs_dropout_prob=drop, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).double()


class Own(nn.Module):
    """A module that no worker can import: the tests' file is no module of theirs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e = nn.Embedding(50, 16)
        self.l = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.h = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.e(input_ids).mean(1)
        for layer in self.l:
            x = x + torch.tanh(layer(x))
        logits = self.h(x)
        assert labels is not None
        return {"loss": F.cross_entropy(logits, labels) * 2, "logits": logits}


def own() -> nn.Module:
    return Own().double()


def frozen() -> nn.Module:
    model = bert()
    for parameter in model.bert.parameters():
        parameter.requires_grad = False
    return model


def dropout() -> nn.Module:
    model = bert(0.5)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


def head() -> nn.Module:
    model = bert()
    transformers.set_seed(5)
    model.classifier = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    return model


def activation() -> nn.Module:
    model = bert()
    model.bert.pooler.activation = nn.ReLU()
    return model


def patched() -> nn.Module:
    model = bert()
    before = model.bert.pooler.forward
    model.bert.pooler.forward = lambda hidden: before(hidden) * 2 + hidden.mean(1)
    return model


def patched_method() -> nn.Module:
    model = bert()

    def forward(self: Any, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).sin()

    model.classifier.forward = types.MethodType(forward, model.classifier)
    return model


def removed() -> nn.Module:
    model = bert()
    del model.bert.encoder.layer[1]
    model.bert.encoder.layer.append(nn.Sequential())  # a module in its place that does nothing
    model.bert.encoder.layer[1].forward = lambda hidden, *_, **__: hidden
    return model


def by_loss(model: nn.Module) -> Tensor:
    names = ("input_ids", "labels") if isinstance(model, Own) else tuple(BATCH)
    return model(**{name: BATCH[name] for name in names})["loss"]


MODELS = {
    "a module of the script": own, "frozen": frozen, "dropout": dropout, "head": head, "activation": activation,
    "patched": patched, "a patched method": patched_method, "removed": removed,
}  # fmt: skip


@pytest.mark.parametrize("split", [False, True], ids=["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", MODELS)
def test_an_instance_trains_as_it_is(name: str, split: bool, tmp_path: Path) -> None:
    make = MODELS[name]
    mine = pipelined(make(), ROWS, tmp_path / "run", 8, split=split)
    assert_alike(mine, plain(make(), by_loss), 1e-9)
    if not split:
        assert_alike(mine, hugging_face(make(), ROWS, tmp_path / "hf", 8), 1e-7)
