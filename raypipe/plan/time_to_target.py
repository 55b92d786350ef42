"""Rank global batches by time to a target loss, each with its best plan.

The time is that of a step x steps of an epoch x epochs until the target. A larger batch makes longer steps and fewer of
them in an epoch, and beyond some size takes more epochs; how many is measured (``raypipe epochs``), never guessed.

Source: Pal et al. 2019, "Optimizing Multi-GPU Parallelization Strategies for Deep Learning Training", section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.plan.choose import Decision
from raypipe.plan.hybrid import EpochsTable


class AtBatch(NamedTuple):
    """A global batch with its best plan."""

    batch: int
    """Samples of a step, over all replicas."""
    epochs: float
    """Epochs until the target."""
    steps: float
    """Steps until the target, a mean over seeds."""
    lr: float | None
    """Learning rate with which the epochs were measured; None if the table does not say."""
    decision: Decision

    @property
    def seconds(self) -> float:
        """Predicted time until the target."""
        return self.decision.best.step_s * self.steps


class ByTime(NamedTuple):
    """Global batches by time to the target, the shortest first."""

    target: float
    ranked: tuple[AtBatch, ...]
    left_out: dict[int, str]
    """Batches without a plan, and why."""


def rank_batches(job: JobSpec, table: EpochsTable, choose_plan: Callable[[JobSpec], Decision]) -> ByTime:
    """Choose a plan for every global batch that the table has epochs of; rank them by time to the job's target.

    Args:
        job: names the target, ``train.early_stop.target``; its own ``train.batch`` must be one of the table's.
        table: epochs by global batch, as ``raypipe epochs`` writes it.
        choose_plan: returns the decision for a job; called once for each batch.

    Raises:
        SpecError: the job names no target or another than the table, the table does not say what a batch or an epoch
            is or does not cover the job's batch, or there is no plan for any batch.
    """
    target = None if job.train.early_stop is None else job.train.early_stop.target
    if target is not None and job.train.best_metric != "loss":
        why = f"the target is one of {job.train.best_metric}, but epochs are measured to a loss"
        raise SpecError("train.best_metric", why, "use loss, with a target for it")
    if target is None:
        raise SpecError(
            "train.early_stop.target",
            "the job names no target to rank plans by the time to",
            "give the validation loss, or leave --epochs out",
        )
    if table.target is not None and table.target != target:
        raise SpecError(
            "train.early_stop.target",
            f"{target:g}, but the epochs were measured to {table.target:g}",
            f"use {table.target:g}, or measure with raypipe epochs --target {target:g}",
        )
    if table.batch is None or table.steps_per_epoch is None:
        key = "batch" if table.batch is None else "steps_per_epoch"
        raise SpecError(
            f"epochs table: {key}",
            "missing, so the steps of an epoch are not known",
            "add it, or measure the table with raypipe epochs",
        )
    by_batch = {workers * table.batch: workers for workers in sorted(table.epochs)}
    if job.train.batch not in by_batch:
        given = ", ".join(map(str, by_batch))
        raise SpecError(
            "train.batch",
            f"the epochs table says nothing about a batch of {job.train.batch}; it has {given}",
            f"use one of these, or measure it with raypipe epochs --workers N, N times {table.batch}",
        )
    found, left_out, first = [], {}, None
    for batch, workers in by_batch.items():
        epochs = table.epochs[workers]
        steps = epochs * table.steps_per_epoch / workers
        own = job.model_copy(update={"train": job.train.model_copy(update={"batch": batch})})
        try:
            found.append(AtBatch(batch, epochs, steps, table.lr.get(workers), choose_plan(own)))
        except SpecError as error:
            first = first or error
            left_out[batch] = error.why
    if first is not None and not found:
        raise first
    return ByTime(target, tuple(sorted(found, key=lambda one: one.seconds)), left_out)
