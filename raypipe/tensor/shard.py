"""How one parameter is divided over the devices of a tensor group, and how it is put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """Equal shares of a parameter along one dimension; also those of its gradient and its optimizer state.

    A fused parameter (query, key and value in one matrix) is several parts behind one another, and each device holds
    its share of every part. ``padded`` fills the last share up with zeros where the length does not divide.
    """

    dim: int
    parts: tuple[int, ...]
    """Lengths of the parts along ``dim``."""
    size: int
    """Devices of the group."""
    padded: bool = False

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole that a share of this shape belongs to."""
        whole = list(shape)
        whole[self.dim] = sum(self.parts)
        return tuple(whole)

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """The share of device ``rank``, with memory of its own."""
        shares = []
        for part in torch.split(whole, list(self.parts), self.dim):
            share = -(-part.shape[self.dim] // self.size)
            first = min(rank * share, part.shape[self.dim])
            held = part.narrow(self.dim, first, min(share, part.shape[self.dim] - first))
            missing = share - held.shape[self.dim]
            if missing:
                shape = list(held.shape)
                shape[self.dim] = missing
                held = torch.cat([held, held.new_zeros(shape)], self.dim)
            shares.append(held)
        return (
            torch.cat(shares, self.dim) if len(shares) > 1 else shares[0].clone(memory_format=torch.contiguous_format)
        )

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        """The whole, from the shares of all devices in the order of their ranks."""
        lengths = [-(-part // self.size) for part in self.parts]
        pieces = zip(*(torch.split(share, lengths, self.dim) for share in shares), strict=True)
        parts = [
            torch.cat(piece, self.dim).narrow(self.dim, 0, length)
            for piece, length in zip(pieces, self.parts, strict=True)
        ]
        return torch.cat(parts, self.dim).contiguous()
