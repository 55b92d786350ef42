"""A stage in segments: runs of layers whose activations are kept, or computed again by the stage's R.

The forward runs the segments one after the other, those that are computed again without a graph. R runs them anew,
each from what entered it; autograd's graph then has a joint wherever a kept segment follows, since that one's graph
begins at the first forward's output.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from raypipe.runtime.runner import Payload


class Segment(NamedTuple):
    """Some parts of a stage's body (``models.chain``)."""

    begin: int
    end: int
    recomputed: bool
    """An R computes it again."""
    gives: tuple[bool, ...]
    """Per tensor that it hands to the next segment, whether a gradient comes back; empty for the last one."""


def parts_of(layers: Sequence[int], recomputed: Collection[int] | None, finest: bool) -> list[list[int]]:
    """Cut a stage's layers where segments meet; ``finest``: everywhere, for segments that will change."""
    if finest:
        return [[i] for i in layers]
    if recomputed is None:
        return [list(layers)]
    return [list(run) for _, run in groupby(layers, lambda i: i in recomputed)]


def segments_of(
    parts: Sequence[Sequence[int]], recomputed: Collection[int] | None, gives: Sequence[tuple[bool, ...]]
) -> tuple[Segment, ...]:
    """Neighbouring parts of one kind together; without ``recomputed``, all are computed again.

    ``gives``: per part, whether gradients come back for what it hands on.
    """
    kinds = [recomputed is None or part[0] in recomputed for part in parts]
    begins = [0, *(k for k in range(1, len(parts)) if kinds[k] != kinds[k - 1]), len(parts)]
    return tuple(
        Segment(a, b, kinds[a], gives[b - 1] if b < len(parts) else ()) for a, b in pairwise(begins)
    )  # fmt: skip


@dataclass(slots=True)
class RecomputeBoundaries:
    """What of one micro-batch joins the segments of a stage."""

    entries: list[Payload] = field(default_factory=list)
    """What entered each segment that is computed again."""
    leaves: list[Payload] = field(default_factory=list)
    """What each of them handed to a kept segment: leaves of that one's graph."""
    recomputed: list[Payload] = field(default_factory=list)
    """The same, computed again."""

    def backward(self) -> None:
        """Go on from the leaves, whose gradients are there, through what was computed again."""
        for leaves, recomputed in zip(reversed(self.leaves), reversed(self.recomputed), strict=True):
            pairs = [
                (y, x.grad) for x, y in zip(leaves, recomputed, strict=True) if x.grad is not None and y.requires_grad
            ]
            if pairs:
                torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])


def as_leaves(payload: Sequence[Tensor], gives: Sequence[bool]) -> Payload:
    """The same values where a new graph begins."""
    return tuple(y.detach().requires_grad_(wanted) for y, wanted in zip(payload, gives, strict=True))
