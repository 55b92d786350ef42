"""Divide a parameter over the ranks of a tensor-parallel group, and join it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """Divides a parameter, its gradient and its optimizer state evenly along one dimension.

    A fused parameter (query, key and value in one matrix) consists of several parts, and each rank holds a share of
    every part.
    """

    dim: int
    parts: tuple[int, ...]
    """Lengths of the parts along ``dim``."""
    size: int
    """Number of ranks of the group."""
    padded: bool = False
    """Whether lengths need not divide by ``size``; the last shares are then padded with zeros."""

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the undivided tensor of which a share has shape ``shape``."""
        whole = list(shape)
        whole[self.dim] = sum(self.parts)
        return tuple(whole)

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """Return the share of rank ``rank`` as a new tensor."""
        shares = []
        for part in torch.split(whole, list(self.parts), self.dim):
            length = -(-part.shape[self.dim] // self.size)
            first = min(rank * length, part.shape[self.dim])
            share = part.narrow(self.dim, first, min(length, part.shape[self.dim] - first))
            missing = length - share.shape[self.dim]
            if missing:
                shape = list(share.shape)
                shape[self.dim] = missing
                share = torch.cat([share, share.new_zeros(shape)], self.dim)
            shares.append(share)
        return (
            torch.cat(shares, self.dim) if len(shares) > 1 else shares[0].clone(memory_format=torch.contiguous_format)
        )

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        """Join the shares of all ranks, in rank order, to the undivided tensor."""
        lengths = [-(-part // self.size) for part in self.parts]
        pieces = zip(*(torch.split(share, lengths, self.dim) for share in shares), strict=True)
        parts = [
            torch.cat(piece, self.dim).narrow(self.dim, 0, length)
            for piece, length in zip(pieces, self.parts, strict=True)
        ]
        return torch.cat(parts, self.dim).contiguous()
