"""The slice of a micro-batch that is running, and the keys and values that it shares with the micro-batch's others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor


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
