"""Keep alpha dropout one operation while a model is traced.

The exporter takes it apart where a model also writes in place. Of the parts nobody could tell what they do in
evaluation, where alpha dropout is the identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("raypipe::alpha_dropout", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def alpha_dropout(x: Tensor, p: float, channels: bool) -> Tensor:
    """Represents alpha dropout, of whole channels or not, in an exported graph; it is traced but never run."""
    raise RuntimeError("alpha dropout is not called through its operator")


@alpha_dropout.register_fake
def _fake(x: Tensor, p: float, channels: bool) -> Tensor:
    return torch.empty_like(x)


OPERATOR = alpha_dropout._opoverload
"""The operation in a graph."""


@contextmanager
def as_one_operation() -> Iterator[None]:
    """Make calls of alpha dropout single operations inside the block."""
    before = F.alpha_dropout, F.feature_alpha_dropout

    def elements(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        return torch.ops.raypipe.alpha_dropout(input, p, False) if training and p else input

    def whole_channels(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        return torch.ops.raypipe.alpha_dropout(input, p, True) if training and p else input

    F.alpha_dropout, F.feature_alpha_dropout = elements, whole_channels
    try:
        yield
    finally:
        F.alpha_dropout, F.feature_alpha_dropout = before
