"""The part of a sequence that is running: a slice of a micro-batch, or what a copy has of sequences that copies divide.

A slice shares keys and values with the micro-batch's other slices. Of C copies that divide sequences into 2C chunks,
copy r has chunks r and 2C - 1 - r, so that all have as much to do in causal attention (Llama Team 2024,
arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from raypipe.tensor.group import current_group


@dataclass(slots=True, eq=False)
class SliceCache:
    """Keys and values of one slice in one attention: ``[batch, heads, positions, width]``, without a graph."""

    keys: Tensor
    values: Tensor
    gradients: tuple[Tensor, Tensor] | None = None
    """Their gradients from the slices after it, which attend to them; None before the first of these is known."""

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Add the gradients that a later slice gives."""
        if self.gradients is None:
            self.gradients = keys, values
            return
        self.gradients[0].add_(keys)
        self.gradients[1].add_(values)

    def release(self) -> None:
        """Drop everything; its slice's backward is over, and so are those of all slices after it."""
        self.keys = self.values = self.keys.new_empty(0)
        self.gradients = None


@dataclass(slots=True)
class SliceRun:
    """A forward of one slice on one stage."""

    number: int
    """Which slice, from 0."""
    count: int
    """Slices of the micro-batch, all of one length."""
    pieces: list[list[SliceCache]]
    """Per attention of the stage, in the order in which they run, the pieces of the slices so far. The forwards of a
    micro-batch's slices share this list; their graphs keep the pieces alive as long as a backward needs them."""
    again: bool = False
    """Whether the forward is an R: all pieces are known, and this slice's get the keys and values of its new graph."""
    attentions: int = field(default=0)
    """How many attentions have run in this forward."""

    def next_attention(self) -> list[SliceCache]:
        """Return the pieces of the attention that runs now."""
        if self.attentions == len(self.pieces):
            self.pieces.append([])
        self.attentions += 1
        return self.pieces[self.attentions - 1]

    def first_position(self, length: int) -> int:
        """Return where the slice begins in its sequence, if it has ``length`` positions."""
        return self.number * length


# A global and not thread-local, like the random keys: autograd may run in other threads, and a process runs only one
# stage task at a time.
_current: SliceRun | None = None


@contextmanager
def slice_run(run: SliceRun | None) -> Iterator[None]:
    """Let the forward inside the block be that of a slice; of a whole micro-batch, if None."""
    global _current
    before, _current = _current, run
    try:
        yield
    finally:
        _current = before


def current_slice() -> SliceRun | None:
    """Return the slice that is running; None where micro-batches run whole."""
    return _current


def own_chunks(rank: int, copies: int) -> tuple[int, int]:
    """Return which of the 2 * ``copies`` chunks of a sequence copy ``rank`` has.

    >>> own_chunks(0, 2), own_chunks(1, 2)
    ((0, 3), (1, 2))
    """
    return rank, 2 * copies - 1 - rank


def current_chunks() -> tuple[SliceRun, ...]:
    """Return the chunks of sequences that this copy runs, each like a slice; none where copies divide no sequences."""
    group = current_group("context")
    if group.size == 1:
        return ()
    return tuple(SliceRun(number, 2 * group.size, []) for number in own_chunks(group.rank, group.size))


def positions_of(length: int, **kind: Any) -> Tensor:
    """Return where ``length`` positions of what runs are in their sequence, as ``torch.arange`` would."""
    if _current is not None:
        return torch.arange(length, **kind) + _current.first_position(length)
    if chunks := current_chunks():
        each = length // len(chunks)
        return torch.cat([torch.arange(each, **kind) + one.first_position(each) for one in chunks])
    return torch.arange(length, **kind)
