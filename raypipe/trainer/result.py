"""The result of ``train``: Ray Train's result, with what ``transformers.TrainOutput`` has as well."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ray.train import Result

if TYPE_CHECKING:
    from raypipe.job import JobSpec


@dataclass
class TrainResult(Result):  # type: ignore[misc]
    """Ray Train's result (metrics, newest checkpoint, path, error)."""

    global_step: int = 0
    """Steps done."""
    training_loss: float = math.nan
    """Mean loss of the steps of this call."""


def result_of(
    result: Result, rows: Sequence[Mapping[str, Any]], job: JobSpec, seconds: float, epochs: float
) -> TrainResult:
    """Return Ray Train's result with the metrics that the Trainer's scripts print.

    Args:
        result: Ray Train's.
        rows: the steps that this call has made, from metrics.jsonl.
        job: the job.
        seconds: how long ``train`` took, planning and start-up included.
        epochs: passes over the training data so far.
    """
    steps = len(rows)
    loss = math.fsum(row["loss"] for row in rows) / steps if steps else math.nan
    own = {field.name: getattr(result, field.name) for field in fields(Result)}
    metrics = {
        **(result.metrics or {}),
        "train_runtime": seconds,
        "train_samples_per_second": steps * job.train.batch / seconds,
        "train_steps_per_second": steps / seconds,
        "train_loss": loss,
        "epoch": epochs,
    }
    done = int(metrics.get("step", rows[-1]["step"] if rows else 0))
    return TrainResult(**{**own, "metrics": metrics}, global_step=done, training_loss=loss)
