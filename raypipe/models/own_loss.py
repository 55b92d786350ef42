"""Losses that the model computes itself, from labels that are among its inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from raypipe.models.task import Inputs, Task

LOSS = "loss"
"""Name of the loss among a model's outputs."""


class OwnLoss(Task):
    """The data of another task ``of``, with the scalar loss that the model returns.

    Such a loss belongs to a whole micro-batch: it is a mean over its targets, or has terms that are not sums over
    samples (such as the load balance of experts). A mini-batch's loss is therefore the mean over its equally large
    micro-batches, which ``(model(**micro_batch).loss / count).backward()`` accumulates.
    """

    of_microbatch = True
    predicts = False
    unit = "as the model computes it"

    def __init__(self, of: Task, fields: Collection[str]) -> None:
        self.of = of
        self.counted = "labels" if "labels" in fields else min(fields, default="labels")
        self.reads = frozenset({self.counted})

    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Return the model's loss times the number of samples, since the runtime divides by all samples."""
        loss = output[..., 0] if self.figures else output
        return loss * len(inputs[self.counted])

    def sums_of_figures(self, output: Tensor, inputs: Inputs) -> Tensor:
        """See Task.sums_of_figures; a figure is of the micro-batch, as the loss is."""
        return output[..., 1:] * len(inputs[self.counted])

    def targets(self, inputs: Inputs) -> int:
        """Count the samples."""
        return len(inputs[self.counted])

    def window(self, sequence: int) -> int:
        """See Task.window."""
        return self.of.window(sequence)

    def from_text(self, rows: Tensor, keys: Sequence[int]) -> dict[str, Tensor]:
        """See Task.from_text; ``shift_labels`` become unshifted ``labels``, because such models shift them."""
        made = self.of.from_text(rows, keys)
        if made.pop("shift_labels", None) is not None:
            made["labels"] = made["input_ids"]
        return made

    def complete(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Task.complete."""
        return self.of.complete(inputs)

    def complete_lengths(self, lengths: Mapping[str, Any]) -> dict[str, Any]:
        """See Task.complete_lengths."""
        return self.of.complete_lengths(lengths)
