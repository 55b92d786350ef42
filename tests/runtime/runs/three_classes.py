"""A model of a user's own, in a module that needs torch alone."""

from __future__ import annotations

from torch import Tensor, nn


class Three(nn.Module):
    """Tells three classes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.last(self.first(features).tanh())
