"""What a model is trained for: which raw inputs the loss reads, and its value as a sum.

Sums, because a mini-batch's mean needs the targets of the whole mini-batch: the runtime divides by their number, which
every device can count from the data. So a loss is the same whatever the micro-batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""Label of what is not to be predicted, PyTorch's and Hugging Face's convention."""


class Task(ABC):
    """A loss."""

    reads: frozenset[str]
    """Raw inputs it reads."""

    @abstractmethod
    def loss(self, output: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Scalar sum over all targets; computed in float32 at least, whatever precision the output comes in."""

    @abstractmethod
    def targets(self, inputs: Mapping[str, Tensor]) -> int:
        """Number of targets that ``loss`` sums over."""


class NextToken(Task):
    """``-log p(label)`` in nats of the token that ``shift_labels`` gives for each place; no label is left out."""

    reads = frozenset({"shift_labels"})

    def loss(self, output: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits ``[batch, sequence, vocabulary]``, labels int64 ``[batch, sequence]``."""
        return token_cross_entropy(output, inputs["shift_labels"])

    def targets(self, inputs: Mapping[str, Tensor]) -> int:
        """Every token."""
        return inputs["shift_labels"].numel()


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over all tokens of ``-log p(target)``, in nats, as a scalar.

    ``logits`` ``[batch, sequence, vocabulary]``, ``targets`` int64 ``[batch, sequence]``. Computed in float32 at
    least, whatever precision the logits come in; float64 stays float64.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
