"""A loss that the model computes itself, from labels that it is given like any other input."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from raypipe.models.task import Inputs, Task

LOSS = "loss"
"""What models call it among their outputs."""


class OwnLoss(Task):
    """Data as another task has it; the loss as the model returns it, a scalar.

    Such a loss is of a micro-batch as a whole: a mean over its targets, and terms that are no sum over samples (how
    evenly tokens spread over experts). So a mini-batch's loss is the mean over its micro-batches, which are equally
    large: what ``(model(**micro_batch).loss / count).backward()`` accumulates.
    """

    unit = "as the model computes it"

    def __init__(self, of: Task, fields: Collection[str]) -> None:
        self.of = of
        self.counted = "labels" if "labels" in fields else min(fields, default="labels")
        self.reads = frozenset({self.counted})

    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """The model's loss, once for each sample."""
        return output * len(inputs[self.counted])

    def targets(self, inputs: Inputs) -> int:
        """Samples."""
        return len(inputs[self.counted])

    def window(self, sequence: int) -> int:
        """As the task has it."""
        return self.of.window(sequence)

    def from_text(self, rows: Tensor, keys: Sequence[int]) -> dict[str, Tensor]:
        """As the task has it, with ``labels`` for ``shift_labels``: models of that kind shift themselves."""
        made = self.of.from_text(rows, keys)
        if made.pop("shift_labels", None) is not None:
            made["labels"] = made["input_ids"]
        return made

    def complete(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As the task has it."""
        return self.of.complete(inputs)

    def complete_lengths(self, lengths: Mapping[str, Any]) -> dict[str, Any]:
        """As the task has it."""
        return self.of.complete_lengths(lengths)
