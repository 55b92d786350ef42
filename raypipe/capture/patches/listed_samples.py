"""Lists of a batch's samples that a model puts together again, as LLaVA does with the features of its images.

``list(x)`` of a tensor asks for as many tensors as there are samples, so a traced model would fit micro-batches of one
size only. While a model is traced, the list holds stand-ins, and ``torch.cat`` or ``torch.stack`` of all of them is a
reshape of ``x``. A model may return stand-ins beside its results; what else is done with one stops the capture. What
the model does with the list's length cannot be noticed here; ``capture`` therefore captures for another number of
samples too, and compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class ListedSamplesError(Exception):
    """A model does more with a list of its samples than putting it together again."""


class _Sample:
    """Stands for sample ``number`` of ``whole``."""

    def __init__(self, whole: Tensor, number: int) -> None:
        self.whole, self.number = whole, number

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        whole, dim = _joined(*args, **(kwargs or {})) if func in (torch.cat, torch.stack) else (None, 0)
        if whole is None:
            raise ListedSamplesError(f"{getattr(func, '__name__', func)} of single samples of a micro-batch")
        if func is torch.stack:
            return whole.movedim(0, dim)
        if dim < 0:
            dim += whole.dim() - 1
        return whole.movedim(0, dim).flatten(dim, dim + 1)

    def __getitem__(self, index: Any) -> Any:
        raise ListedSamplesError("it indexes single samples of a micro-batch")

    def __getattr__(self, name: str) -> Any:
        raise ListedSamplesError(f"it reads {name} of single samples of a micro-batch")


def without_stand_ins(returned: Any) -> Any:
    """Return what a model returns with None in place of stand-ins, which are no results of a graph."""
    return pytree.tree_map(lambda x: None if isinstance(x, _Sample) else x, returned)


def _joined(tensors: Any, dim: int = 0) -> tuple[Tensor | None, int]:
    """Return the tensor whose samples these are, all and in order; None if they are not."""
    if not isinstance(tensors, Sequence) or not isinstance(tensors[0], _Sample):
        return None, dim
    whole = tensors[0].whole
    own = all(isinstance(t, _Sample) and t.whole is whole and t.number == n for n, t in enumerate(tensors))
    return (whole if own and len(tensors) == _hint(whole) else None), dim


def _hint(whole: Tensor) -> int | None:
    """Return the number of samples in the example; None where it depends on values."""
    samples = whole.shape[0]
    return samples.node.hint if isinstance(samples, torch.SymInt) else samples


@contextmanager
def listed_samples(samples: int, used: list[str]) -> Iterator[None]:
    """Let lists of all ``samples`` hold stand-ins inside the block; ``used`` gets an entry for each such list."""
    iterate, length = Tensor.__iter__, Tensor.__len__

    def ours(whole: Tensor) -> bool:
        return bool(whole.dim()) and isinstance(whole.shape[0], torch.SymInt) and _hint(whole) == samples

    def stand_ins(whole: Tensor) -> Iterator[Any]:
        if not ours(whole):
            return iterate(whole)  # type: ignore[no-any-return, no-untyped-call]
        used.append(str(whole.shape))
        return iter([_Sample(whole, number) for number in range(samples)])

    def hint(whole: Tensor) -> int:  # list() asks for it
        return samples if ours(whole) else length(whole)  # type: ignore[no-untyped-call]

    Tensor.__iter__, Tensor.__len__ = stand_ins, hint  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.__iter__, Tensor.__len__ = iterate, length  # type: ignore[method-assign]
