"""Tasks of models whose forward returns the loss: their own, or that of a function at its end."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from raypipe.errors import SpecError
from raypipe.models.task import IGNORED, Field, Inputs, Task, at_least_float32

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
        self.of, self.masks = of, of.masks
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


LABELS = ("labels", "shift_labels")


class GivenLoss(OwnLoss):
    """The data of another task ``of``, with losses ``[samples, ...]`` that are added up.

    With one loss a sample, a mini-batch's loss is the mean over its samples. With one loss a label, it is the mean over
    the labels that are not ``IGNORED``, as in PyTorch; there may be one loss less than labels, where the first label
    has no prediction. Neither depends on how a mini-batch falls into micro-batches.
    """

    of_microbatch = False
    unit = "as the function computes it"

    def __init__(self, of: Task, fields: Collection[str]) -> None:
        super().__init__(of, fields)
        self.per_label, self.shifted = False, False

    def fit(self, two: tuple[int, ...], three: tuple[int, ...], fields: Mapping[str, Field]) -> None:
        """Learn what losses there are from their shapes for two and for three samples.

        Raises:
            SpecError: there is neither one a sample nor one a label.
        """
        labels = next((name for name in LABELS if name in fields), None)
        shape = fields[labels].shape if labels is not None else None
        if two[:1] == (2,) and three[:1] == (3,) and two[1:] == three[1:]:
            if two[1:] == ():
                return
            one_less = shape is not None and len(shape) == 1 and two[1:] == (shape[0] - 1,)
            if labels is not None and (two[1:] == shape or one_less):
                self.per_label, self.shifted, self.counted = True, one_less, labels
                self.reads = frozenset({labels})
                return
        why = f"the function returns shape {list(two)} for 2 samples and {list(three)} for 3"
        fix = "return one loss a sample, or one a label, as with reduction='none'; or set model.loss_per: microbatch"
        raise SpecError("model.loss", why, fix)

    def _counts(self, inputs: Inputs) -> Tensor:
        labels = inputs[self.counted]
        return (labels[:, 1:] if self.shifted else labels) != IGNORED

    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Return the sum of the losses that count, in float32 or (for float64 losses) float64."""
        return self._sum(output[..., 0] if self.figures else output, inputs)

    def sums_of_figures(self, output: Tensor, inputs: Inputs) -> Tensor:
        """See Task.sums_of_figures; they count where the losses do."""
        return torch.stack([self._sum(figure, inputs) for figure in output[..., 1:].unbind(-1)])

    def _sum(self, values: Tensor, inputs: Inputs) -> Tensor:
        values = at_least_float32(values)
        return values.masked_fill(~self._counts(inputs), 0.0).sum() if self.per_label else values.sum()

    def targets(self, inputs: Inputs) -> int:
        """Count these losses."""
        return int(self._counts(inputs).sum()) if self.per_label else len(inputs[self.counted])

    def from_text(self, rows: Tensor, keys: Sequence[int]) -> dict[str, Tensor]:
        """See Task.from_text."""
        return self.of.from_text(rows, keys)
