"""Digits as 8 x 8 images, drawn from a font and then shifted and blurred by noise, and a small network that reads them.

They are drawn, not handwritten, so that nothing has to be fetched: ``python -m jobs.digits digits.npz`` writes them.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor, nn

FONT = (
    "01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111", "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00010 01100",
)  # fmt: skip
"""Seven rows of five dots for each digit."""


class Digits(nn.Module):
    """Two layers: images ``[batch, 64]`` to logits ``[batch, 10]``."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.hidden, self.classify = nn.Linear(64, hidden), nn.Linear(hidden, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Return the logits of some images."""
        return self.classify(torch.relu(self.hidden(image)))  # type: ignore[no-any-return]


def build(hidden: int = 64) -> nn.Module:
    """Build the network, as ``model: {import: "jobs.digits:build"}`` asks."""
    return Digits(hidden)


def draw(count: int, seed: int = 0, noise: float = 0.4) -> dict[str, np.ndarray]:
    """Draw ``image`` float32 ``[count, 64]`` and ``labels`` int64 ``[count]``."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 10, count)
    images = generator.normal(0.0, noise, (count, 8, 8))
    for image, label in zip(images, labels, strict=True):
        row, column = generator.integers(0, 2), generator.integers(0, 4)
        image[row : row + 7, column : column + 5] += [[int(dot) for dot in line] for line in FONT[label].split()]
    return {"image": images.reshape(count, 64).astype(np.float32), "labels": labels.astype(np.int64)}


if __name__ == "__main__":
    np.savez(sys.argv[1], **draw(4096))  # type: ignore[arg-type]
