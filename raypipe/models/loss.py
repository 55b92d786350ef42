"""Loss functions, as sums: the runtime divides by the mini-batch's tokens, which no stage knows by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over all tokens of ``-log p(target)``, in nats, as a scalar.

    ``logits`` ``[batch, sequence, vocabulary]``, ``targets`` int64 ``[batch, sequence]``. Computed in float32 at
    least, whatever precision the logits come in; float64 stays float64.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
