"""What a model is trained for: which raw inputs the loss reads, its value as a sum, and how bytes become raw inputs.

Sums, because a mini-batch's mean needs the targets of the whole mini-batch: the runtime divides by their number, which
every device can count from the data. So a loss is the same whatever the micro-batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raypipe.errors import SpecError
from raypipe.models.keyed_random import random_halves
from raypipe.tensor.loss import divided_cross_entropy

MASK = "attention_mask"
"""Raw input that tells a sample's own places, 1, from those that only pad it, 0."""
IGNORED = -100
"""Label of what is not to be predicted, PyTorch's and Hugging Face's convention."""
BYTES = 256
"""Tokens that text read as bytes has."""

Inputs = Mapping[str, Tensor]
"""Raw inputs of some samples by name, one row per sample."""
Lengths = Mapping[str, int]
"""Of a micro-batch: to what length each raw input is padded of which samples have their own. Empty where none has."""
ANY_LENGTH: Lengths = MappingProxyType({})


class Field(NamedTuple):
    """What a raw input is, for one sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Task(ABC):
    """A loss, and the raw inputs it takes."""

    reads: frozenset[str]
    """Raw inputs that the loss reads."""
    padding = 0
    """Token that fills up short samples; nothing may depend on it."""
    per_token = False
    """Every token has a label of its own, in its place."""
    unit = "nats per label"
    """Of the mean loss, the sum over its targets: for people."""

    @abstractmethod
    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Scalar sum over all targets; computed in float32 at least, whatever precision the output comes in."""

    @abstractmethod
    def targets(self, inputs: Inputs) -> int:
        """Number of targets that ``loss`` sums over."""

    def window(self, sequence: int) -> int:
        """Bytes of text that a sample takes, beside the one that follows it."""
        return sequence

    def from_text(self, rows: Tensor, keys: Sequence[int]) -> dict[str, Tensor]:
        """Raw inputs from bytes, int64 ``[samples, window + 1]``; ``keys``: a 64-bit random number per sample.

        Raises:
            SpecError: bytes are nothing for this task.
        """
        raise SpecError("data.type", "bytes have no labels for this model's task", "use data: {type: arrays, ...}")

    def complete(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The user's arrays with what follows from them."""
        return dict(inputs)

    def complete_lengths(self, lengths: Mapping[str, Any]) -> dict[str, Any]:
        """The same for the lengths of samples: what follows from an array is as long."""
        return dict(lengths)

    def text_fields(self, sequence: int) -> dict[str, Field]:
        """What ``from_text`` makes, for one sample."""
        made = self.from_text(torch.zeros(1, self.window(sequence) + 1, dtype=torch.int64), [0])
        return {name: Field(tuple(values.shape[1:]), values.dtype) for name, values in made.items()}


class Labels(Task):
    """``-log p(label)`` in nats, summed over all labels but those that are ``IGNORED``.

    Output ``[..., classes]``, ``labels`` int64 ``[...]``: one per sample, or one per token.
    """

    reads = frozenset({"labels"})
    classes: int | None = None
    """All classes, where the output is one member's share of them (tensor parallelism); None where it is whole."""

    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Sum over the labels."""
        return cross_entropy(output, inputs["labels"], self.classes)

    def targets(self, inputs: Inputs) -> int:
        """Labels that count."""
        return int((inputs["labels"] != IGNORED).sum())


class NextToken(Labels):
    """Labels of the following token: ``shift_labels`` gives each place its own; ``labels`` are the tokens themselves.

    The first is what packed text gives: every place has a target. The second is Hugging Face's convention for samples
    of their own: the last place has none, nor has what is ``IGNORED``.
    """

    per_token = True
    unit = "nats per token"

    def __init__(self, fields: Collection[str] = ("shift_labels",)) -> None:
        self.shifted = "shift_labels" in fields
        self.reads = frozenset({"shift_labels" if self.shifted else "labels"})

    def _pair(self, output: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        if self.shifted:
            return output, inputs["shift_labels"]
        return output[:, :-1], inputs["labels"][:, 1:]

    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Logits ``[batch, sequence, vocabulary]``, labels int64 ``[batch, sequence]``."""
        return cross_entropy(*self._pair(output, inputs), self.classes)

    def targets(self, inputs: Inputs) -> int:
        """Tokens that have one after them."""
        labels = inputs["shift_labels"] if self.shifted else inputs["labels"][:, 1:]
        return int((labels != IGNORED).sum())

    def from_text(self, rows: Tensor, keys: Sequence[int]) -> dict[str, Tensor]:
        """The bytes, and the same shifted by one."""
        return {"input_ids": rows[:, :-1].contiguous(), "shift_labels": rows[:, 1:].contiguous()}


class MaskedToken(Labels):
    """Guess the masked tokens from all others.

    Of text, each byte is masked with probability ``share``, by the sample's key alone. Devlin et al. 2018 (BERT)
    leave a tenth of the masked ones as they are and replace another tenth at random; here all are masked.
    """

    per_token = True
    unit = "nats per token"

    def __init__(self, mask_token: int, share: float) -> None:
        self.mask_token, self.share = mask_token, share

    def from_text(self, rows: Tensor, keys: Sequence[int]) -> dict[str, Tensor]:
        """Masked bytes, and labels where they were."""
        tokens = rows[:, :-1]
        # A half hash is uniform over 16 bits, the lowest of them are masked.
        below = round(self.share * 65536) - 32768
        masked = random_halves(keys, tokens.shape[1], tokens.device) < below
        return {
            "input_ids": tokens.masked_fill(masked, self.mask_token),
            "labels": tokens.masked_fill(~masked, IGNORED),
        }


class Sequences(Labels):
    """Tokens of one sequence from another one (encoder and decoder).

    Of text, the decoder is to write what follows the encoder's part. The decoder reads the labels shifted to the
    right by one, behind ``start_token``.
    """

    unit = "nats per token"

    def __init__(self, start_token: int, padding: int) -> None:
        self.start_token, self.padding = start_token, padding

    def window(self, sequence: int) -> int:
        """The encoder's part and the decoder's, equally long."""
        return 2 * sequence

    def from_text(self, rows: Tensor, keys: Sequence[int]) -> dict[str, Tensor]:
        """First half and second half."""
        read, written = rows[:, :-1].chunk(2, dim=1)
        return self.complete({"input_ids": read.contiguous(), "labels": written.contiguous()})

    def complete(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``decoder_input_ids`` from the labels, where they are not given."""
        if "decoder_input_ids" in inputs or "labels" not in inputs:
            return dict(inputs)
        labels = inputs["labels"]
        shifted = torch.cat([torch.full_like(labels[:, :1], self.start_token), labels[:, :-1]], dim=1)
        return {**inputs, "decoder_input_ids": shifted.masked_fill(shifted == IGNORED, self.padding)}

    def complete_lengths(self, lengths: Mapping[str, Any]) -> dict[str, Any]:
        """``decoder_input_ids`` are as long as the labels."""
        if "decoder_input_ids" in lengths or "labels" not in lengths:
            return dict(lengths)
        return {**lengths, "decoder_input_ids": lengths["labels"]}


class Values(Task):
    """Squared error, summed over all values: output and float ``labels`` of one shape, a last 1 aside."""

    reads = frozenset({"labels"})
    unit = "squared error per value"

    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Sum over the values."""
        labels = inputs["labels"]
        if output.dim() == labels.dim() + 1:
            output = output.squeeze(-1)
        if output.dtype != torch.float64:
            output = output.float()
        return (output - labels.to(output.dtype)).square().sum()

    def targets(self, inputs: Inputs) -> int:
        """All values."""
        return inputs["labels"].numel()


def cross_entropy(logits: Tensor, labels: Tensor, classes: int | None = None) -> Tensor:
    """Sum of ``-log p(label)``, in nats, as a scalar, without the labels that are ``IGNORED``.

    ``logits`` ``[..., classes]``, ``labels`` int64 ``[...]``. Computed in float32 at least, whatever precision the
    logits come in; float64 stays float64. With ``classes``, the logits are a member's share of so many.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    if classes is not None:
        return divided_cross_entropy(logits.flatten(0, -2), labels.flatten(), classes, IGNORED)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=IGNORED)
