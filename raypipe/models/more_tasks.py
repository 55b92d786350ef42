"""Tasks of speech and of images: transcripts (CTC) and a label for every pixel."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from raypipe.models.task import IGNORED, MASK, Inputs, Task


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
        labels = inputs["labels"]
        if output.dtype != torch.float64:
            output = output.float()
        frames = torch.full((len(output),), output.shape[1], device=output.device)
        if MASK in inputs:
            frames = inputs[MASK].sum(-1)
            for kernel, stride in self.convolutions:
                frames = torch.div(frames - kernel, stride, rounding_mode="floor") + 1
        own = labels >= 0
        return F.ctc_loss(
            output.log_softmax(-1).transpose(0, 1), labels[own], frames, own.sum(-1), self.blank, "sum",
            self.zero_infinity,
        )  # fmt: skip

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
        labels = self._labels(inputs)
        if output.dtype != torch.float64:
            output = output.float()
        if output.shape[-2:] != labels.shape[-2:]:
            output = F.interpolate(output, size=labels.shape[-2:], mode="bilinear", align_corners=False)
        return F.cross_entropy(output, labels, reduction="sum", ignore_index=IGNORED)

    def targets(self, inputs: Inputs) -> int:
        """Count the pixels that are not ignored."""
        return int((self._labels(inputs) != IGNORED).sum())
