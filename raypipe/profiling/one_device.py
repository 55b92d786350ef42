"""Train a job's model on this process alone, with the global batch of N workers, until a validation loss is reached.

The one device computes the workers' batches one after another and updates after the last (delayed gradient update),
so the steps are those that N data-parallel workers would make.

Source: Pal et al. 2019, "Optimizing Multi-GPU Parallelization Strategies for Deep Learning Training", section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from raypipe.data import Dataset, declared_fields, open_data, prepare_data
from raypipe.data.sample_order import Split
from raypipe.errors import SpecError
from raypipe.job import JobSpec
from raypipe.models import LayeredModel, StageBody, build_model
from raypipe.models.build import DTYPES
from raypipe.models.keyed_random import random_keys
from raypipe.runtime.update.optimizer import learning_rate, make_optimizer, set_rate

Say = Callable[[str], None]


@dataclass(frozen=True)
class Reached:
    """How one run ended."""

    epochs: float | None
    """Passes over the training data until the first validation at or below the target; None: never within the limit."""
    steps: int
    """Updates made."""
    best: float
    """Lowest validation loss seen, in the task's unit."""


class OneDevice:
    """A job's model and data, to be trained again and again from its start.

    Args:
        job: the job; ``train.batch`` is one worker's batch, ``parallel`` is not read.
        folder: an empty folder for the prepared data.

    Raises:
        SpecError: model or data cannot be used, or the loss of a sample depends on the other samples of its batch.
    """

    def __init__(self, job: JobSpec, folder: Path) -> None:
        self.job = job
        self.model: LayeredModel = build_model(job, declared_fields(job.data))
        if self.model.batch_statistics:
            why = "the loss of a sample depends on its micro-batch (batch norm, or the model's own loss)"
            raise SpecError("model", why, "set model.batch_norm: frozen, or leave model.loss out")
        prepare_data(job, self.model.task, folder)
        self.data: Dataset = open_data(folder, self.model.task, job.data.pad_to_multiple_of)
        self.samples = self.data.samples("train")

    def train(self, batch: int, seed: int, lr: float, target: float, most_epochs: float, say: Say) -> Reached:
        """Train from the start until the validation loss is at or below ``target``, or ``most_epochs`` are over.

        Args:
            batch: samples of a step; a multiple of ``train.batch``.
            seed: of the start values, the order of the data and dropout.
            lr: peak learning rate. The job's schedule runs over ``most_epochs``; its warm-up takes as many samples as
                in the job, and so do the pauses between validations (``eval_every``; 0: an epoch).
            target: validation loss, in the task's unit.
            most_epochs: where to give up.
            say: called after each validation.
        """
        piece = self.job.train.batch
        steps = max(1, math.floor(most_epochs * self.samples / batch))
        every = max(1, (self.job.train.eval_every * piece or self.samples) // batch)
        warmup = math.ceil(self.job.train.warmup_steps * piece / batch)
        train = self.job.train.model_copy(update={"lr": lr, "steps": steps, "warmup_steps": warmup, "seed": seed})
        stage = self.model.build_stage(range(self.model.count), seed)
        parameters = {name: p for name, p in stage.named().items() if p.requires_grad}
        optimizer = make_optimizer(train, parameters)
        best = math.inf
        for step in range(steps):
            self._gradients(stage, seed, step, batch)
            if train.clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters.values(), train.clip)
            set_rate(optimizer, learning_rate(train, step))
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % every == 0 or step + 1 == steps:
                loss = self.validation_loss(stage)
                best, epochs = min(best, loss), (step + 1) * batch / self.samples
                say(f"batch {batch}, seed {seed}: {epochs:.2f} epochs, validation loss {loss:.4f}")
                if loss <= target:
                    return Reached(epochs, step + 1, best)
                if not math.isfinite(loss):
                    return Reached(None, step + 1, best)
        return Reached(None, steps, best)

    def _gradients(self, stage: StageBody, seed: int, step: int, batch: int) -> None:
        """Accumulate the gradients of the mean loss over all targets of a step, a worker's batch at a time."""
        whole = self._inputs("train", seed, step, batch)
        targets = self.model.task.targets(whole)
        for first in range(0, batch, self.job.train.batch):
            rows = range(first, min(batch, first + self.job.train.batch))
            inputs = {name: values[rows.start : rows.stop] for name, values in whole.items()}
            with random_keys(seed, step, rows, training=True), self._autocast():
                output = stage((), inputs)[0]
            (self.model.task.loss(output, inputs) / max(1, targets)).backward()  # type: ignore[no-untyped-call]

    def validation_loss(self, stage: StageBody) -> float:
        """Return the mean loss over the targets of ``train.eval_batches`` batches of held-out samples."""
        total, targets = 0.0, 0
        with torch.no_grad():
            for number in range(self.job.train.eval_batches):
                inputs = self._inputs("val", 0, number, self.job.train.batch)
                with random_keys(0, number, range(self.job.train.batch), training=False), self._autocast():
                    output = stage((), inputs)[0]
                total += float(self.model.task.loss(output, inputs))
                targets += self.model.task.targets(inputs)
        return total / max(1, targets)

    def _inputs(self, split: Split, seed: int, step: int, batch: int) -> dict[str, Tensor]:
        """Return a mini-batch in the model's precision."""
        dtype = DTYPES[self.job.train.dtype]
        rows = self.data.batch(split, seed, step, batch)
        return {name: t.to(dtype) if t.is_floating_point() else t for name, t in rows.items()}

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.job.train.dtype == "bfloat16")
