"""Where received tensors live: ordinary host memory, or pinned memory that a GPU copies from by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Allocate = Callable[[Sequence[int], torch.dtype], Tensor]


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor."""
    return torch.empty(shape, dtype=dtype)


def empty_pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The same, pinned. torch keeps freed blocks, so this is cheap after the first steps; needs CUDA."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)
