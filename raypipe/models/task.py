"""Tasks: the loss of a model, the raw inputs it reads, and how bytes of text become raw inputs.

Losses are sums over targets. The runtime divides them by the number of targets of the whole mini-batch, which every
device can count from the data, so the mean does not depend on the division into micro-batches.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raypipe.errors import SpecError
from raypipe.models.keyed_random import random_halves
from raypipe.tensor.operators import divided_cross_entropy

MASK = "attention_mask"
"""Name of the raw input that marks a sample's own tokens with 1 and padding with 0."""
POSITIONS = "position_ids"
"""Name of the raw input that numbers a sample's tokens; it restarts where another document begins."""
BY_TOKEN = frozenset({"input_ids", "labels", "shift_labels", "token_type_ids"})
"""Raw inputs with one value for each token, of which documents that are packed may have."""
IGNORED = -100
"""Label of positions that the loss ignores, as in PyTorch and Hugging Face."""
BYTES = 256
"""Number of tokens of text that is read as bytes."""

Inputs = Mapping[str, Tensor]
"""Raw inputs of some samples by name, one row per sample."""
Lengths = Mapping[str, int]
"""Per raw input of varying length, the length that a micro-batch is padded to. Empty if all lengths are fixed."""
ANY_LENGTH: Lengths = MappingProxyType({})


class FirstRows:
    """The first rows of the data's array, for a model whose shapes follow from values.

    All are equal, and equal to none at all, for fields are the same whatever the values of their rows.

    Args:
        read: returns the first so many rows, or fewer where there are not so many.
    """

    def __init__(self, read: Callable[[int], Tensor]) -> None:
        self.read = read

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, FirstRows)

    def __hash__(self) -> int:
        return hash(None)


class Field(NamedTuple):
    """Shape and dtype of a raw input for one sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: FirstRows | None = None
    packed: bool = False
    """Whether the numbers of a row restart, as several documents are packed into it."""


def packed_fields(fields: Mapping[str, Field], row_tokens: int) -> dict[str, Field]:
    """Return the fields of rows into which documents with these ``fields`` are packed.

    Raises:
        SpecError: a field has not one value for each token.
    """
    made = {name: field for name, field in fields.items() if name != MASK}
    for name, field in made.items():
        if name not in BY_TOKEN or len(field.shape) != 1 or field.dtype.is_floating_point:
            fix = f"leave it out; documents have {', '.join(sorted(BY_TOKEN))}"
            raise SpecError("data.path", f"{name} cannot be packed with train.tokens_per_step", fix)
    if "input_ids" not in made:
        raise SpecError("data.path", "has no input_ids, so its rows are no documents", "name the tokens input_ids")
    made = {name: Field((row_tokens,), field.dtype) for name, field in made.items()}
    return {**made, POSITIONS: Field((row_tokens,), torch.int64, packed=True)}


class Task(ABC):
    """A loss and the raw inputs it reads."""

    reads: frozenset[str]
    """Raw inputs that the loss reads."""
    padding = 0
    """Token that pads short samples; results must not depend on it."""
    per_token = False
    """Whether every token has a label, at the same position."""
    unit = "nats per label"
    """Unit of the mean loss (the sum over the number of targets), for display."""
    of_microbatch = False
    """Whether the loss of a sample depends on the other samples of its micro-batch."""
    predicts = True
    """Whether the model's output is a prediction of labels; it may be the loss itself."""
    figures: tuple[str, ...] = ()
    """Names of figures that follow the loss in the last dimension of the model's output (``loss_function``)."""
    ignored: float | None = None
    """The label that is no target, so that rows of a mini-batch can be left out; None if the loss needs every row."""
    masks = False
    """Whether text is masked for it (``data.mask``)."""
    classes: int | None = None
    """Number of all classes, if the output is one tensor rank's share of them; None if it has all classes."""

    def smoothed(self, share: float) -> Task:
        """Make this the task whose labels share their probability (``train.label_smoothing``), and return it.

        Raises:
            SpecError: the labels are no classes, or the loss is not the task's.
        """
        if share:
            why = f"{share} is a share of the probability of classes, which this model's loss has not"
            raise SpecError("train.label_smoothing", why, "leave it out, or smooth in the loss itself")
        return self

    @abstractmethod
    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Return the loss summed over all targets: a scalar, computed in float32 or (for float64 outputs) float64."""

    @abstractmethod
    def targets(self, inputs: Inputs) -> int:
        """Count the targets that ``loss`` sums over."""

    def slice_inputs(self, inputs: Inputs, numbers: Sequence[int], slices: int) -> Inputs:
        """Return the raw inputs of some of the equal ``slices`` of whole sequences."""
        cut = {name: x.chunk(slices, 1) for name, x in inputs.items()}
        return {name: torch.cat([parts[n] for n in numbers], dim=1) for name, parts in cut.items()}

    def sums_of_figures(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Return the figures summed over all targets: ``[figures]``; only where there are ``figures``."""
        raise NotImplementedError

    def labels(self, inputs: Inputs) -> Tensor:
        """Return what the output predicts, ``[samples, ...]``; only where it ``predicts``."""
        return inputs["labels"]

    def window(self, sequence: int) -> int:
        """Return the number of bytes of text in a sample, without the one that follows it."""
        return sequence

    def from_text(self, rows: Tensor, keys: Sequence[int]) -> dict[str, Tensor]:
        """Make raw inputs from bytes, int64 ``[samples, window + 1]``; ``keys`` has a 64-bit random number per sample.

        Raises:
            SpecError: the task cannot be trained on bytes.
        """
        raise SpecError("data.type", "bytes have no labels for this model's task", "use data: {type: arrays, ...}")

    def complete(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add the raw inputs that are derived from the user's arrays."""
        return dict(inputs)

    def complete_lengths(self, lengths: Mapping[str, Any]) -> dict[str, Any]:
        """Add the lengths of the raw inputs that ``complete`` derives."""
        return dict(lengths)

    def text_fields(self, sequence: int) -> dict[str, Field]:
        """Return the fields that ``from_text`` makes."""
        made = self.from_text(torch.zeros(1, self.window(sequence) + 1, dtype=torch.int64), [0])
        return {name: Field(tuple(values.shape[1:]), values.dtype) for name, values in made.items()}


class Labels(Task):
    """Cross-entropy: ``-log p(label)`` in nats, summed over all labels except those that are ``IGNORED``.

    Output ``[..., classes]``, ``labels`` int64 ``[...]``: one per sample, or one per token. With a ``smoothing``, that
    share of a label's probability is spread evenly over all classes (Szegedy et al. 2016, section 7).
    """

    reads = frozenset({"labels"})
    ignored = IGNORED
    smoothing = 0.0

    def smoothed(self, share: float) -> Task:
        """See ``Task.smoothed``."""
        self.smoothing = share
        return self

    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Return the cross-entropy summed over the labels."""
        return cross_entropy(output, inputs["labels"], self.classes, self.smoothing)

    def targets(self, inputs: Inputs) -> int:
        """Count the labels that are not ``IGNORED``."""
        return int((inputs["labels"] != IGNORED).sum())


class NextToken(Labels):
    """Prediction of the next token, from ``shift_labels`` or from ``labels``.

    ``shift_labels``, made from packed text, hold the next token of every position. ``labels`` follow Hugging Face's
    convention for separate samples: they are the tokens themselves, and the last position has no target.
    """

    per_token = True
    unit = "nats per token"

    def __init__(self, fields: Collection[str] = ("shift_labels",)) -> None:
        self.shifted = "shift_labels" in fields
        self.reads = frozenset({"shift_labels" if self.shifted else "labels"})

    def _pair(self, output: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
        if "shift_labels" in inputs:  # so in the data, or made for a slice
            return output, inputs["shift_labels"]
        return output[:, :-1], inputs["labels"][:, 1:]

    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Return the summed cross-entropy of logits ``[batch, sequence, vocabulary]``; labels ``[batch, sequence]``."""
        return cross_entropy(*self._pair(output, inputs), self.classes, self.smoothing)

    def targets(self, inputs: Inputs) -> int:
        """Count the positions whose next token is a target."""
        labels = inputs["shift_labels"] if self.shifted else inputs["labels"][:, 1:]
        return int((labels != IGNORED).sum())

    def slice_inputs(self, inputs: Inputs, numbers: Sequence[int], slices: int) -> Inputs:
        """See ``Task.slice_inputs``; the target of a slice's last position is the token after it."""
        if not self.shifted and "labels" in inputs:
            labels = inputs["labels"]
            after = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)
            inputs = {**inputs, "shift_labels": after}
        return super().slice_inputs(inputs, numbers, slices)

    def labels(self, inputs: Inputs) -> Tensor:
        """Return the labels as the data has them: the tokens themselves, or each one's next token."""
        return inputs["shift_labels" if self.shifted else "labels"]

    def from_text(self, rows: Tensor, keys: Sequence[int]) -> dict[str, Tensor]:
        """Return the bytes as ``input_ids``, and shifted by one as ``shift_labels``."""
        return {"input_ids": rows[:, :-1].contiguous(), "shift_labels": rows[:, 1:].contiguous()}


class MaskedToken(Labels):
    """Prediction of masked tokens from all others.

    In text, each byte is masked with probability ``share``, which the sample's key decides. Devlin et al. 2018 (BERT)
    keep a tenth of these tokens and replace another tenth at random; here all become the mask token.
    """

    per_token = True
    masks = True
    unit = "nats per token"

    def __init__(self, mask_token: int, share: float) -> None:
        self.mask_token, self.share = mask_token, share

    def from_text(self, rows: Tensor, keys: Sequence[int]) -> dict[str, Tensor]:
        """Return the bytes with some masked, and labels at the masked positions."""
        tokens = rows[:, :-1]
        # A half hash is uniform over 16 bits; the lowest values are masked.
        below = round(self.share * 65536) - 32768
        masked = random_halves(keys, tokens.shape[1], tokens.device) < below
        return {
            "input_ids": tokens.masked_fill(masked, self.mask_token),
            "labels": tokens.masked_fill(~masked, IGNORED),
        }


class Sequences(Labels):
    """Prediction of one sequence from another, for encoder-decoder models.

    In text, the decoder's part is the continuation of the encoder's. The decoder reads the labels shifted to the right
    by one, after ``start_token``.
    """

    unit = "nats per token"

    def __init__(self, start_token: int, padding: int) -> None:
        self.start_token, self.padding = start_token, padding

    def window(self, sequence: int) -> int:
        """Return the bytes of the encoder's part and of the decoder's, which are equally long."""
        return 2 * sequence

    def from_text(self, rows: Tensor, keys: Sequence[int]) -> dict[str, Tensor]:
        """Return the first half as ``input_ids`` and the second as ``labels``."""
        read, written = rows[:, :-1].chunk(2, dim=1)
        return self.complete({"input_ids": read.contiguous(), "labels": written.contiguous()})

    def complete(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add ``decoder_input_ids``, made from the labels, if they are not given."""
        if "decoder_input_ids" in inputs or "labels" not in inputs:
            return dict(inputs)
        labels = inputs["labels"]
        shifted = torch.cat([torch.full_like(labels[:, :1], self.start_token), labels[:, :-1]], dim=1)
        return {**inputs, "decoder_input_ids": shifted.masked_fill(shifted == IGNORED, self.padding)}

    def complete_lengths(self, lengths: Mapping[str, Any]) -> dict[str, Any]:
        """Add the length of ``decoder_input_ids``, which is that of the labels."""
        if "decoder_input_ids" in lengths or "labels" not in lengths:
            return dict(lengths)
        return {**lengths, "decoder_input_ids": lengths["labels"]}


class Values(Task):
    """Squared error, summed over all values but those that are not a number.

    Output and ``labels`` have the same shape, except for a last dimension of size 1 that the output may have.
    """

    reads = frozenset({"labels"})
    unit = "squared error per value"
    ignored = math.nan

    def complete(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make whole numbers floating-point, so that labels can be left out."""
        labels = inputs.get("labels")
        if labels is None or labels.is_floating_point():
            return dict(inputs)
        return {**inputs, "labels": labels.to(torch.float64)}

    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Return the loss summed over the values."""
        labels = inputs["labels"]
        if output.dim() == labels.dim() + 1:
            output = output.squeeze(-1)
        output = at_least_float32(output)
        labels = labels.to(output.dtype)
        unknown = labels.isnan()  # of these neither the loss nor its gradient has a part
        return self.of(output, labels.masked_fill(unknown, 0.0)).masked_fill(unknown, 0.0).sum()

    def of(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each value."""
        return (output - labels).square()

    def targets(self, inputs: Inputs) -> int:
        """Count the values that are numbers."""
        return int((~inputs["labels"].isnan()).sum())


class SeveralLabels(Values):
    """Binary cross-entropy in nats, summed over all labels of a sample but those that are not a number.

    Output and float ``labels`` are ``[samples, labels]``; a label is the probability that it applies, mostly 0 or 1.
    """

    unit = "nats per label"

    def of(self, output: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each label."""
        return F.binary_cross_entropy_with_logits(output, labels, reduction="none")


def at_least_float32(values: Tensor) -> Tensor:
    """Return the values in float32, or as they are if they are float64: losses are summed in this dtype."""
    return values if values.dtype == torch.float64 else values.float()


class Unprojected(ABC):
    """Logits that have not been computed: what the head reads stands for them (``train.loss_chunk_tokens``)."""

    @abstractmethod
    def __getitem__(self, at: Any) -> Unprojected:
        """Return those of some positions; ``at`` leaves the last dimension alone."""

    @abstractmethod
    def then(self, scale: Callable[[Tensor], Tensor]) -> Unprojected:
        """Return what a function makes of each logit by itself."""

    def to(self, dtype: torch.dtype) -> Unprojected:
        """Return them in another dtype."""
        return self.then(lambda logits: logits.to(dtype))

    @abstractmethod
    def logits(self) -> Tensor:
        """Compute all of them."""

    @abstractmethod
    def cross_entropy(self, labels: Tensor, classes: int | None, smoothing: float) -> Tensor:
        """Return the same as the function ``cross_entropy``, of ``labels`` that are as many as the logits' rows."""

    def row_statistics(self, labels: Tensor, classes: int, smoothing: float) -> Tensor:
        """Return what one of several heads, each with some rows, says of each token: two numbers, ``[..., 2]``.

        The first is the logsumexp of its logits. The second is the part of its logits in the labels' probability: the
        target's logit where it has that row, else 0; with smoothing, also a share of all.

        Args:
            labels: int64 ``[...]``, counted from its first row.
            classes: rows of all heads.
            smoothing: as ``cross_entropy``'s.
        """
        raise NotImplementedError


def cross_entropy(
    logits: Tensor | Unprojected, labels: Tensor, classes: int | None = None, smoothing: float = 0.0
) -> Tensor:
    """Return the sum of ``-log p(label)`` in nats, a scalar, over the labels that are not ``IGNORED``.

    It is computed in float32, or in float64 if the logits are float64.

    Args:
        logits: ``[..., classes]``.
        labels: int64 ``[...]``.
        classes: number of all classes, if the logits are one tensor rank's share of them.
        smoothing: share of a label's probability that all classes have evenly.
    """
    if isinstance(logits, Unprojected):
        return logits.cross_entropy(labels, classes, smoothing)
    logits = at_least_float32(logits)
    if classes is not None:
        return divided_cross_entropy(logits.flatten(0, -2), labels.flatten(), classes, IGNORED, smoothing)
    return F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=IGNORED, label_smoothing=smoothing
    )


class Transcript(Task):
    """Connectionist temporal classification: the transcript's negative log-probability, summed over the samples.

    Output ``[batch, frames, classes]``; ``labels`` int64 ``[batch, length]``, with ``IGNORED`` (or any negative number)
    behind the transcript. With an ``attention_mask`` of the waveform, only frames of a sample's own values count.
    A mean is taken over all labels of the mini-batch.

    Source: Graves et al. 2006 (CTC); the lengths as in ``transformers.Wav2Vec2ForCTC``.

    Args:
        blank: class of the blank.
        zero_infinity: count an impossible alignment as 0 (``config.ctc_zero_infinity``).
        convolutions: kernel and stride of each convolution between waveform and frames.
        fields: names of the data's arrays.
    """

    unit = "nats per label"

    def __init__(
        self, blank: int, zero_infinity: bool, convolutions: Sequence[tuple[int, int]], fields: Collection[str]
    ) -> None:
        self.blank, self.zero_infinity, self.convolutions = blank, zero_infinity, tuple(convolutions)
        self.reads = frozenset({"labels", *({MASK} & set(fields))})

    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Return the loss summed over the samples; in float32, or float64 if the output is."""
        labels, output = inputs["labels"], at_least_float32(output)
        frames = torch.full((len(output),), output.shape[1], device=output.device)
        if MASK in inputs:
            frames = inputs[MASK].sum(-1)
            for kernel, stride in self.convolutions:
                frames = torch.div(frames - kernel, stride, rounding_mode="floor") + 1
        own = labels >= 0
        return F.ctc_loss(
            output.log_softmax(-1).transpose(0, 1),
            labels[own],
            frames,
            own.sum(-1),
            self.blank,
            "sum",
            self.zero_infinity,
        )

    def targets(self, inputs: Inputs) -> int:
        """Count the labels of all transcripts."""
        return int((inputs["labels"] >= 0).sum())


class Pixels(Task):
    """Cross entropy of every pixel's label, in nats; ``ignored`` pixels and those of ``IGNORED`` are left out.

    Output ``[batch, classes, height, width]``, which is scaled to the labels' size bilinearly; ``labels`` int64
    ``[batch, height, width]``.
    """

    reads = frozenset({"labels"})
    unit = "nats per pixel"
    ignored = IGNORED

    def __init__(self, ignored: int) -> None:
        self.background = ignored

    def _labels(self, inputs: Inputs) -> Tensor:
        return inputs["labels"].masked_fill(inputs["labels"] == self.background, IGNORED)

    def loss(self, output: Tensor, inputs: Inputs) -> Tensor:
        """Return the cross entropy summed over the pixels; in float32, or float64 if the output is."""
        labels, output = self._labels(inputs), at_least_float32(output)
        if output.shape[-2:] != labels.shape[-2:]:
            output = F.interpolate(output, size=labels.shape[-2:], mode="bilinear", align_corners=False)
        return F.cross_entropy(output, labels, reduction="sum", ignore_index=IGNORED)

    def targets(self, inputs: Inputs) -> int:
        """Count the pixels that are not ignored."""
        return int((self._labels(inputs) != IGNORED).sum())
