"""A text tower and an image tower that are trained to agree, shaped as CLIP; an image tower before a language model.

``model: {import: "jobs.two_towers:build", loss: model, args: {...}}`` in a job; ``two-towers.yaml`` is one, and
``python -m jobs.two_towers pairs.npz`` writes its data: drawn digits with their names. ``captions.yaml`` has
``jobs.two_towers:captions``, which writes those names.

Source: Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision", section 2.4 and
Figure 3.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jobs.digits import draw

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LENGTH = 16
"""Tokens of a text: bytes, then the end, 256, then padding, 0."""
SIDE = 32
"""Rows and columns of an image."""


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a shortcut: ``[batch, length, width]``."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Text(nn.Module):
    """Token ids ``[batch, length]`` to ``[batch, width]``: what is at each text's end, its largest id."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(length, width) * 0.01)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position
        for block in self.blocks:
            x = block(x)
        end = ids.argmax(1)[:, None, None].expand(-1, 1, x.shape[2])
        return self.norm(x).gather(1, end).squeeze(1)


class Image(nn.Module):
    """Images ``[batch, 3, side, side]`` to ``[batch, width]``: a vision transformer's class token."""

    def __init__(self, width: int, layers: int, heads: int, side: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch, bias=False)
        self.token = nn.Parameter(torch.randn(width) * width**-0.5)
        self.position = nn.Parameter(torch.randn((side // patch) ** 2 + 1, width) * width**-0.5)
        self.before, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = self.before(torch.cat([self.token.expand(x.shape[0], 1, -1), x], 1) + self.position)
        for block in self.blocks:
            x = block(x)
        return self.norm(x[:, 0])


class TwoTowers(nn.Module):
    """The loss of texts ``ids`` and images ``image`` that belong together, row by row."""

    def __init__(self, text: dict[str, int], image: dict[str, int], shared: int) -> None:
        super().__init__()
        self.text, self.image = Text(**text), Image(**image)
        self.from_text = nn.Linear(text["width"], shared, bias=False)
        self.from_image = nn.Linear(image["width"], shared, bias=False)
        self.scale = nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, ids: Tensor, image: Tensor) -> dict[str, Tensor]:
        a = F.normalize(self.from_text(self.text(ids)), dim=1)
        b = F.normalize(self.from_image(self.image(image)), dim=1)
        pairs = self.scale.exp() * a @ b.T
        own = pairs.log_softmax(0).diagonal() + pairs.log_softmax(1).diagonal()
        return {"loss": -own.mean() / 2}


def build(**configuration: Any) -> nn.Module:
    """What ``model: {import: "jobs.two_towers:build", args: {text: {...}, image: {...}, shared: ...}}`` calls."""
    return TwoTowers(**configuration)


class Captions(nn.Module):
    """The loss of texts ``ids``, token by token, behind what an encoder says of their images ``image``."""

    def __init__(self, text: dict[str, int], image: dict[str, int], frozen: bool) -> None:
        super().__init__()
        self.image = Image(**image).requires_grad_(not frozen)
        self.project = nn.Linear(image["width"], text["width"])
        self.text = Text(**text)
        self.head = nn.Linear(text["width"], text["vocabulary"])

    def forward(self, ids: Tensor, image: Tensor) -> dict[str, Tensor]:
        x = self.text.token(ids[:, :-1]) + self.text.position[:-1] + self.project(self.image(image))[:, None]
        for block in self.text.blocks:
            x = block(x)
        logits = self.head(self.text.norm(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())}


def captions(frozen: bool = False, **configuration: Any) -> nn.Module:
    """What ``model: {import: "jobs.two_towers:captions", args: {text: {...}, image: {...}}}`` calls.

    ``frozen``: the encoder is not trained.
    """
    return Captions(**configuration, frozen=frozen)


def pairs(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw ``image`` float32 ``[count, 3, 32, 32]`` and ``ids`` int64 ``[count, 16]``."""
    drawn = draw(count, seed)
    small = drawn["image"].reshape(count, 1, 8, 8)
    images = np.broadcast_to(small.repeat(SIDE // 8, 2).repeat(SIDE // 8, 3), (count, 3, SIDE, SIDE))
    texts = np.zeros((count, LENGTH), dtype=np.int64)
    for row, label in zip(texts, drawn["labels"], strict=True):
        name = list(f"digit {NAMES[label]}".encode())
        row[: len(name) + 1] = [*name, 256]
    return {"image": np.ascontiguousarray(images), "ids": texts}


if __name__ == "__main__":
    np.savez(sys.argv[1], **pairs(4096))  # type: ignore[arg-type]
