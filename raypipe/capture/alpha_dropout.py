"""Alpha dropout as one operation of a graph; ``patches.whole_alpha_dropout`` puts it there while a model is traced.

The exporter takes it apart where a model also writes in place. Of the parts nobody could tell what they do in
evaluation, where alpha dropout is the identity.
"""

from __future__ import annotations

import torch
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
