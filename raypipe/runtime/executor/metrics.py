"""The predictions of a validation that workers keep, and the figures that a user's function computes from all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raypipe.data import validation_places
from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.job.train_spec import TrainSpec
from raypipe.models import Inputs, Task
from raypipe.models.sources.imported import find_function
from raypipe.models.task import IGNORED, Unprojected
from raypipe.tensor.operators import gather_from_group

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


PREFIX = "val_"
"""Begins the name of a figure of a validation in metrics.jsonl, as in ``val_loss``."""


@dataclass(frozen=True, slots=True)
class ValidationMetrics:
    """The user's functions."""

    compute: Callable[[Any], Mapping[str, Any]]
    """From ``Predictions`` to figures by name, as transformers' ``compute_metrics``."""
    preprocess: Preprocess | None = None
    """Runs on the device that has the last stage, on each micro-batch, so that less of it is sent to the driver."""

    def of(self, batches: Sequence[Sequence[MicrobatchPredictions]], job: JobSpec, data: Path) -> dict[str, float]:
        """Return the figures of a validation, each name with ``PREFIX``.

        Args:
            batches: of every validation batch, what its devices kept.
            job: the job.
            data: the run's prepared data; samples of arrays come in the order of their rows.

        Raises:
            SpecError: the function fails, or returns something else than numbers by name.
        """
        batch = job.train.batch
        places = validation_places(job, data, batch * len(batches))
        result = _called(self.compute, together(batches, batch, places))
        return {name if name.startswith(PREFIX) else PREFIX + name: value for name, value in result.items()}


def validation_metrics(train: TrainSpec) -> ValidationMetrics | None:
    """Import the functions that ``train.metrics`` names; None if it names none.

    Raises:
        SpecError: there is no such function.
    """
    if train.metrics is None:
        return None
    compute = find_function(train.metrics, "train.metrics")
    preprocess = getattr(sys.modules[train.metrics.partition(":")[0]], "preprocess_logits", None)
    return ValidationMetrics(compute, preprocess)


def _called(compute: Callable[[Any], Mapping[str, Any]], predictions: Predictions) -> dict[str, float]:
    where = "train.metrics"
    try:
        result = compute(predictions)
    except Exception as error:  # the user's code may raise anything
        shapes = f"predictions {list(predictions.predictions.shape)}, label_ids {list(predictions.label_ids.shape)}"
        raise SpecError(
            where, f"the function raised {type(error).__name__}: {error}", f"it was given {shapes}"
        ) from error
    if not isinstance(result, Mapping):
        raise SpecError(where, f"the function returned a {type(result).__name__}", "return numbers by name, as a dict")
    made = {}
    for name, value in result.items():
        try:
            made[str(name)] = float(value)
        except (TypeError, ValueError):
            why = f"the function returned {name} of type {type(value).__name__}"
            raise SpecError(where, why, "return one number per name") from None
    return made
