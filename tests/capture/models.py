"""The families that are captured in tests, small, and a residual CNN and an MLP as people write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from raypipe.models.sources.hugging_face import configuration
from tests.capture.transformers_builder import builder

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 96,
    "max_position_embeddings": 32,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, dict[str, object]] = {
    "gpt2": {"n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": 96, "n_positions": 32},
    "opt": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 96, "vocab_size": 96,
            "word_embed_proj_dim": 32, "max_position_embeddings": 32},
    "llama": GROUPED,
    "qwen3": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 6},
    "gemma": GROUPED,
    "bert": SMALL,
    "roberta": {**SMALL, "max_position_embeddings": 40},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 96},
    "vit": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
            "image_size": 16, "patch_size": 4},
}  # fmt: skip
"""Changes to each family's own configuration."""
NO_DROPOUT = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "dropout_rate", "attention_dropout",
              "hidden_dropout_prob", "attention_probs_dropout_prob")  # fmt: skip


class Residual(nn.Module):
    """Two convolutions beside a shortcut, with in-place ReLUs and an in-place addition."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Conv2d(inside, outside, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """A small ResNet: loss if labels are given, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1), Residual(16, 32, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(32, 10)

    def forward(self, image: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.classify(self.pool(self.blocks(self.stem(image))).flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def mlp() -> nn.Module:
    """A plain stack."""
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU(),
                         nn.Linear(32, 4))  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model to capture and data to run it on."""

    build: Callable[[], nn.Module]
    data: Callable[[int, int], dict[str, Tensor]]
    subgraphs: list[str]
    options: dict[str, object] = field(default_factory=dict)


def family(name: str, dropout: bool = False) -> Callable[[], nn.Module]:
    """The constructor of a small model of a family, in float64."""

    def build() -> nn.Module:
        config = configuration(name, FAMILIES[name])
        for key in NO_DROPOUT if not dropout else ():
            if hasattr(config, key):
                setattr(config, key, 0.0)
        return builder(config)().double()

    return build


def tokens(batch: int, sequence: int) -> dict[str, Tensor]:
    """Tokens with padding at the end of some rows, and labels."""
    draw = torch.Generator().manual_seed(batch * 100 + sequence)
    mask = torch.ones(batch, sequence, dtype=torch.int64)
    mask[0, -3:] = 0
    ids = torch.randint(3, 96, (2, batch, sequence), generator=draw)
    return {"input_ids": ids[0], "attention_mask": mask, "labels": ids[1]}


def images(batch: int, size: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(batch)
    labels = torch.randint(0, 2, (batch,), generator=draw)
    return {"image": torch.randn(batch, 3, size, size, dtype=torch.float64, generator=draw), "labels": labels}


def vit_images(batch: int, size: int) -> dict[str, Tensor]:
    made = images(batch, 16)
    return {"pixel_values": made["image"], "labels": made["labels"]}


def rows(batch: int, size: int) -> dict[str, Tensor]:
    return {"input": torch.randn(batch, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(batch))}


def transformer(layers: int) -> list[str]:
    return ["embedding", *["attention", "mlp"] * layers, "head"]


ALIKE = ("opt", "qwen3", "gemma", "roberta")
"""Families that are captured as another one here is: llama, or bert."""
CASES: dict[str, Case] = {
    **{name: Case(family(name), tokens, transformer(2)) for name in ("opt", "llama", "qwen3", "mistral", "gemma")},
    "gpt2": Case(family("gpt2"), tokens, transformer(3)),
    "bert": Case(family("bert"), tokens, transformer(2)),
    "roberta": Case(family("roberta"), tokens, transformer(2)),
    "t5": Case(
        family("t5"), tokens,
        [*transformer(2)[:-1], "embedding", *["attention", "attention", "mlp"] * 2, "head"],
    ),
    "vit": Case(family("vit"), vit_images, transformer(2)),
    "resnet": Case(lambda: ResNet().double(), images, ["stem", *["convolution"] * 4, "head"]),
    "mlp": Case(lambda: mlp().double(), rows, ["mlp"] * 4),
}  # fmt: skip
