"""Segments of a stage: runs of layers whose activations are either kept or recomputed by the stage's R task.

The forward runs the segments in order, the recomputed ones without a graph. R runs each recomputed segment again from
its saved inputs. Where a kept segment follows a recomputed one, the autograd graph has a gap, because the kept
segment's graph begins at the output of the first forward. ``RecomputeBoundaries`` carries gradients across the gaps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from raypipe.runtime.transport.channel import Payload


class Segment(NamedTuple):
    """Consecutive parts ``begin`` to ``end`` (exclusive) of a stage's body (``models.layered``)."""

    begin: int
    end: int
    recomputed: bool
    """Whether an R task recomputes it."""
    gives: tuple[bool, ...]
    """Per tensor passed to the next segment, whether a gradient comes back; empty for the last segment."""


def parts_of(layers: Sequence[int], recomputed: Collection[int] | None, finest: bool) -> list[list[int]]:
    """Divide a stage's layers at segment boundaries; with ``finest`` (segments may change) into single layers."""
    if finest:
        return [[i] for i in layers]
    if recomputed is None:
        return [list(layers)]
    return [list(run) for _, run in groupby(layers, lambda i: i in recomputed)]


def segments_of(
    parts: Sequence[Sequence[int]], recomputed: Collection[int] | None, gives: Sequence[tuple[bool, ...]]
) -> tuple[Segment, ...]:
    """Join neighbouring parts that are all kept, or all recomputed, into segments.

    Args:
        parts: layers of each part.
        recomputed: layers that are recomputed; None for all.
        gives: per part but the last and per tensor it passes on, whether a gradient comes back.
    """
    kinds = [recomputed is None or part[0] in recomputed for part in parts]
    begins = [0, *(k for k in range(1, len(parts)) if kinds[k] != kinds[k - 1]), len(parts)]
    return tuple(Segment(a, b, kinds[a], gives[b - 1] if b < len(parts) else ()) for a, b in pairwise(begins))


@dataclass(slots=True)
class RecomputeBoundaries:
    """The tensors of one micro-batch at the boundaries between the segments of a stage."""

    entries: list[Payload] = field(default_factory=list)
    """Inputs of each recomputed segment."""
    leaves: list[Payload] = field(default_factory=list)
    """Outputs of each recomputed segment that a kept segment follows: leaves of the kept segment's graph."""
    recomputed: list[Payload] = field(default_factory=list)
    """The same outputs, computed again by R with a graph."""

    def backward(self) -> None:
        """Continue the backward from the gradients of ``leaves`` through the recomputed segments."""
        for leaves, recomputed in zip(reversed(self.leaves), reversed(self.recomputed), strict=True):
            pairs = [
                (y, x.grad) for x, y in zip(leaves, recomputed, strict=True) if x.grad is not None and y.requires_grad
            ]
            if pairs:
                torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])


def as_leaves(payload: Sequence[Tensor], gives: Sequence[bool]) -> Payload:
    """Detach tensors so that a new graph begins there; ``gives`` says which of them require a gradient."""
    return tuple(y.detach().requires_grad_(wanted) for y, wanted in zip(payload, gives, strict=True))
