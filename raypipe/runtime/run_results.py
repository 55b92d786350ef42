"""Check, put together and log what devices report of steps and validations."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypipe.data import validation_weights
from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import RunLog
from raypipe.plan.online.measured_steps import StepClock
from raypipe.runtime.early_stop import Patience, score
from raypipe.runtime.executor.step import StepResult, check_samples, communication_counts, expert_load, waits_of
from raypipe.runtime.recovery.nonfinite import NonFiniteError, NonFinitePolicy
from raypipe.runtime.run_metrics import RunMetrics
from raypipe.runtime.update.norm import clip_factor, norm_of
from raypipe.runtime.update.optimizer import learning_rate
from raypipe.runtime.validation.metrics import PREFIX, ValidationMetrics
from raypipe.schedule.lowering.asynchronous import Part


class RunResults:
    """The results of one attempt at a run, in the order of its steps.

    Args:
        job: the job.
        data: the run's prepared data.
        tokens_per_step: tokens of a mini-batch, or its samples where these are no tokens.
        log: gets a row for each step and validation.
        metrics: hear of them as well.
        nonfinite: what to do about a step whose loss or gradients are not finite.
    """

    def __init__(
        self,
        job: JobSpec,
        data: Path,
        tokens_per_step: float,
        log: RunLog,
        metrics: RunMetrics,
        nonfinite: NonFinitePolicy,
    ) -> None:
        self._job, self._data, self._train, self._tokens_per_step = job, data, job.train, tokens_per_step
        self._streams = job.data.type == "documents"
        self._log, self._metrics, self._nonfinite = log, metrics, nonfinite
        self.newest: dict[str, Any] = {}
        """The newest losses and figures of a validation."""
        self.counts = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0, "p2p": 0, "p2p_bytes": 0}
        """Number of messages, their bytes and the collectives between devices in the newest step."""
        self.patience: Patience | None = None
        """Told of every validation."""
        self.validation_metrics: ValidationMetrics | None = None
        """Computes more figures of a validation from its predictions."""
        self.score = math.inf
        """Score of the newest validation."""
        self._logged = 0
        """Number of steps done at the newest row of a step."""
        self._at = 0.0
        """When the newest step came."""

    @property
    def steps(self) -> int:
        """Number of steps done at the newest row of a step; 0 for none since the run began or went back."""
        return self._logged

    def forget(self) -> None:
        """Log steps again that come again, because the run has gone back and their rows are gone."""
        self._logged = 0

    def pause(self) -> None:
        """Note that the next step takes its time from now."""
        self._at = time.monotonic()

    def validation(self, step: int, results: Sequence[StepResult]) -> None:
        """Take in a validation after ``step`` steps; ``results`` are by batch, then by rank.

        Raises:
            NonFiniteError: its loss is not finite.
            SampleCountError: it covers other samples than it should.
            SpecError: the job's function for metrics fails, or does not return ``train.best_metric``.
        """
        batches = self._train.eval_batches
        check_samples(f"validation after step {step}", results, self._train.batch * batches)
        ranks = len(results) // batches
        by_batch = [results[k * ranks : (k + 1) * ranks] for k in range(batches)]
        weights = validation_weights(self._job, self._data)
        shares = [(weight / sum(weights), r) for weight, of in zip(weights, by_batch, strict=True) for r in of]
        loss = math.fsum(share * r.loss_sum for share, r in shares)
        if not math.isfinite(loss):
            raise NonFiniteError(step, f"the validation loss is {loss}")
        row = {"val_loss": loss}
        for name, value in ((PREFIX + name, share * value) for share, r in shares for name, value in r.figures):
            row[name] = row.get(name, 0.0) + value
        if self.validation_metrics is not None:
            kept = [[prediction for result in of for prediction in result.predictions] for of in by_batch]
            row = {**row, **self.validation_metrics.of(kept, self._job, self._data), "val_loss": loss}
        self.score = score(self._train, row)
        self.newest |= row
        self._log.metric({"step": step, **row})
        self._metrics.validation(loss)
        if self.patience is not None:
            self.patience.saw(step, self.score)

    def step(
        self, step: int, part: Part, clock: StepClock, results: Sequence[StepResult], tensor: int, timed: bool = True
    ) -> float | None:
        """Take in a step; return its time in seconds, or None if no device has made its update.

        Args:
            step: its number, from 1.
            part: how it began and ended.
            clock: times it.
            results: by rank.
            tensor: number of ranks of a device.
            timed: whether all devices have reported the times of their tasks.

        Raises:
            NonFiniteError: its loss or its gradients are not finite, and the run is not to go on with the next step.
            SampleCountError: it covers other samples than it should.
        """
        check_samples(f"step {step}", results, self._train.batch)
        loss = math.fsum(r.loss_sum for r in results)
        norm = norm_of(r.norm_squared for r in results)
        if not math.isfinite(norm):  # the loss may still be finite although the parameters no longer are
            of_loss = f"the training loss is {loss}"
            of_norm = f"the gradient norm is {norm}, the training loss {loss:.4f}"
            self._skipped(step, of_norm if math.isfinite(loss) else of_loss, clock)
            return None
        if not math.isfinite(loss):
            raise NonFiniteError(step, f"the training loss is {loss}")
        if results[0].optimistic and clip_factor(self._train.clip or math.inf, norm) < 1.0:
            self._log.event("undone", step=step, grad_norm=norm)
        for of in {of.stage: of for r in results for of in r.first_k}.values():
            self._log.event("first_k", step=step, stage=of.stage, k=of.k, most=of.most, bytes_by_k=of.peaks)
        # The tensor-parallel ranks of a device run in lockstep, so the times of the first one stand for all.
        devices = results[::tensor]
        if timed:
            step_s, bubble_ratio = clock.add(part, [r.times for r in devices], waits_of(devices), step)
            self.counts |= communication_counts(results, tensor)
        else:  # all of it counts as idle, because nearly all of it was
            step_s, bubble_ratio = max(1e-9, time.monotonic() - self._at), 1.0
        self.pause()
        self.newest |= {"loss": loss}
        if step <= self._logged:
            return step_s  # a recovery has repeated it: all devices had reported it, and none had made its update final
        self._logged = step
        row: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "grad_norm": norm,
            "lr": learning_rate(self._train, step - 1),
            "step_s": step_s,
            "tokens_per_s": self._tokens_per_step / step_s,
            "bubble_ratio": bubble_ratio,
        }
        if self._streams:
            row["data_wait_share"] = max(r.data_wait_s for r in results) / step_s
        if loads := expert_load(devices):
            row["expert_load"] = loads
        if self._train.report_to:
            row |= self._metrics.figures(step_s, devices)
        self._log.metric(row)
        self._metrics.step(row, clock, devices)
        return step_s

    def _skipped(self, step: int, what: str, clock: StepClock) -> None:
        self._nonfinite.skip(step, what)
        clock.pause()
        self.pause()
        self._log.event("skipped", step=step, message=what)
        self._metrics.event("skipped", {})
