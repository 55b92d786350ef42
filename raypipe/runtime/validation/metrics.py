"""Figures of a validation that the user's function computes from all predictions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.data import validation_places
from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.job.train_spec import TrainSpec
from raypipe.models.sources.imported import find_function
from raypipe.runtime.validation.predictions import MicrobatchPredictions, Predictions, Preprocess, together

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
