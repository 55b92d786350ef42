"""Gradients that accumulate in one flat tensor, so that a collective needs no copy before or after it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class FlatGradients:
    """The gradients of some parameters of one dtype, which are views of one flat tensor from ``open`` to ``close``.

    Args:
        parameters: in the order in which their gradients lie in the flat tensor.
        size: elements of the flat tensor, if it is padded with zeros beyond the parameters' own.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], size: int | None = None) -> None:
        self.parameters = tuple(parameters)
        self._sizes = [p.numel() for p in parameters]
        self._size = sum(self._sizes) if size is None else size
        self._views: list[Tensor] = []
        self.flat = torch.empty(0)
        self.lasting = False
        """Whether every step has the same memory; else it is allocated anew."""
        self._kept: tuple[Tensor, list[Tensor]] | None = None

    @property
    def size(self) -> int:
        """Elements of the flat tensor."""
        return self._size

    @property
    def opened(self) -> bool:
        """Return whether gradients accumulate in the flat tensor now."""
        return bool(self._views)

    def open(self) -> None:
        """Let gradients accumulate in the flat tensor; those that were computed elsewhere are copied into it."""
        if not self._views and self._kept is not None:
            self.flat, self._views = self._kept
            self.flat.zero_()
        elif not self._views:
            first = self.parameters[0]
            self.flat = torch.zeros(self._size, dtype=first.dtype, device=first.device)
            parts = torch.split(self.flat[: sum(self._sizes)], self._sizes)
            self._views = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
        for p, view in zip(self.parameters, self._views, strict=True):
            if p.grad is not view:
                if p.grad is not None:
                    view.copy_(p.grad)
                p.grad = view

    def close(self) -> Tensor:
        """Drop the gradients; returns the flat tensor, which is freed unless somebody keeps it."""
        for p in self.parameters:
            p.grad = None
        if self.lasting and self._views:
            self._kept = self.flat, self._views
        flat, self._views, self.flat = self.flat, [], torch.empty(0)
        return flat
