"""The progress of a run, as the Trainer's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raypipe.checkpoint import best
from raypipe.observe.run_dir import RECORD
from raypipe.observe.run_log import METRICS, read_rows
from raypipe.train import saved_job
from raypipe.trainer.history import History


def steps_of(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl that are of steps."""
    return [row for row in read_rows(directory / METRICS) if "val_loss" not in row]


def state_of(directory: Path, history: History) -> Any:
    """Return ``transformers.TrainerState`` of the run in ``directory``; ``history`` takes in its log."""
    from transformers import TrainerState

    rows = read_rows(directory / METRICS)
    for row in rows:
        history.take(row)
    steps = steps_of(directory)
    state = TrainerState(
        epoch=history.epoch(len(steps)),
        global_step=len(steps),
        log_history=history.entries,
        max_steps=saved_job(directory).train.steps if (directory / RECORD).exists() else 0,
    )
    kept = best(directory / "checkpoints")
    if kept is not None:
        metric = saved_job(directory).train.best_metric
        state.best_model_checkpoint, state.best_global_step = str(kept.path), kept.step
        state.best_metric = next(
            (row.get(f"val_{metric}") for row in rows if row["step"] == kept.step and "val_loss" in row), None
        )
    return state
