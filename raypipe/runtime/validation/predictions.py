"""The predictions of a validation batch that a worker keeps, and their way into one array of all samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raypipe.models import Inputs, Task
from raypipe.models.task import IGNORED, Unprojected
from raypipe.tensor.group import gather_from_group

Array = NDArray[Any]
Preprocess = Callable[[Tensor, Tensor], Tensor]
"""From the logits of some samples and their labels to what is kept of the logits; runs on the device."""


class Predictions(NamedTuple):
    """The argument of a function for metrics: those two fields of transformers' ``EvalPrediction`` that hold values."""

    predictions: Array
    """The model's output, ``[samples, ...]``, or what the preprocessing made of it."""
    label_ids: Array
    """``[samples, ...]``."""


class MicrobatchPredictions(NamedTuple):
    """Predictions of one micro-batch."""

    samples: tuple[int, ...]
    """Numbers in the mini-batch, from 0."""
    predictions: Array
    labels: Array


@dataclass(slots=True)
class KeepsPredictions:
    """Keeps what the last stage of a device puts out during one validation batch."""

    task: Task
    preprocess: Preprocess | None
    kept: list[MicrobatchPredictions] = field(default_factory=list)

    def add(self, samples: Sequence[int], output: Tensor | Unprojected, inputs: Inputs) -> None:
        """Keep the output of a micro-batch."""
        labels, classes = self.task.labels(inputs), self.task.classes
        made = output.logits() if isinstance(output, Unprojected) else output
        if classes is not None:  # this rank's share of them
            made = gather_from_group(made, classes)
        made = made if self.preprocess is None else self.preprocess(made, labels)
        self.kept.append(MicrobatchPredictions(tuple(samples), _array(made), _array(labels)))


def _array(x: Tensor) -> Array:
    made: Array = (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).detach().cpu().numpy()
    return made


def together(
    batches: Sequence[Sequence[MicrobatchPredictions]], batch: int, places: Sequence[int] | None
) -> Predictions:
    """Put the predictions of a whole validation into the order of its samples.

    Args:
        batches: of every validation batch, what was kept of it.
        batch: samples of a mini-batch.
        places: the row of each sample, by its number in the validation; a row that comes again is left out. None to
            leave the samples in the order of the validation.
    """
    result: dict[int, tuple[Array, Array]] = {}
    for number, parts in enumerate(batches):
        for part in parts:
            for sample, made, labels in zip(part.samples, part.predictions, part.labels, strict=True):
                at = number * batch + sample
                result.setdefault(at if places is None else places[at], (made, labels))
    rows = [result[at] for at in sorted(result)]
    return Predictions(_stacked([made for made, _ in rows]), _stacked([labels for _, labels in rows]))


def _stacked(rows: Sequence[Array]) -> Array:
    """Stack rows, which may differ in their first size; they are padded with ``IGNORED``, as transformers does."""
    longest = max((row.shape[0] for row in rows if row.ndim), default=0)
    if all(row.shape == rows[0].shape for row in rows):
        return np.stack(rows)
    made = np.full((len(rows), longest, *rows[0].shape[1:]), IGNORED, rows[0].dtype)
    for to, row in zip(made, rows, strict=True):
        to[: len(row)] = row
    return made
