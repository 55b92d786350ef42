"""Models for test_divergence: in a module that imports little, since what it imports is part of what it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Countdown(nn.Module):
    """Logits, of which the first takes a square root with it: down to 0 its gradient is finite, at 0 it is not.

    No sample has that label, so training only ever lowers it; the loss stays finite all the while.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(8, 3)
        self.left = nn.Parameter(torch.tensor([0.15]))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.logits(x)
        return torch.cat([logits[:, :1] + torch.sqrt(self.left * (self.left > 0)), logits[:, 1:]], 1)


def countdown() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), Countdown())


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3))
