"""How good a validation is, as ``train.best_metric`` and ``train.best_is`` say: the lowest score is the best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raypipe.errors import SpecError, nearest
from raypipe.job.train_spec import TrainSpec
from raypipe.runtime.validation.metrics import PREFIX


def score(train: TrainSpec, row: Mapping[str, Any]) -> float:
    """Return the score of a validation from its row of metrics.jsonl.

    Raises:
        SpecError: the row has no such figure.
    """
    name = PREFIX + train.best_metric.removeprefix(PREFIX)
    if name not in row:
        figures = [key.removeprefix(PREFIX) for key in row if key.startswith(PREFIX)]
        why = f"{train.best_metric} is not among the figures of a validation, {', '.join(figures)}"
        raise SpecError("train.best_metric", why, nearest(train.best_metric, figures))
    return -float(row[name]) if train.best_is == "highest" else float(row[name])
