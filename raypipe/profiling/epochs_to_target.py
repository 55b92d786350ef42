"""Measure epochs to a target loss against the global batch: the table that ``raypipe hybrid`` reads.

Each run is a line of a log beside the table, so a measurement that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from raypipe.data import Dataset, declared_fields, open_data, prepare_data
from raypipe.data.sample_order import Split
from raypipe.errors import SpecError
from raypipe.files import parse_json, read_regular, write_whole
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
    """A job's model and data, to be trained on this process alone again and again from its start.

    It computes the batches of N workers one after another and updates after the last (delayed gradient update), so the
    steps are those that N data-parallel workers would make (Pal et al. 2019, "Optimizing Multi-GPU Parallelization
    Strategies for Deep Learning Training", section 4.2).

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
        if job.train.tokens_per_step is not None:
            why = "the batches that are tried are of samples, and a step of this job takes tokens"
            raise SpecError("train.tokens_per_step", why, "set it to null, and give train.batch")
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


Scaling = Literal["linear", "sqrt", "none"]


class Asked(NamedTuple):
    """A request for a measurement."""

    target: float
    """Validation loss at which a run ends, in the task's unit."""
    workers: tuple[int, ...]
    """Numbers of data-parallel workers; a step takes as many times ``train.batch`` samples."""
    seeds: int
    """Runs for each number of workers, with seeds from ``train.seed`` up."""
    most_epochs: float
    """Epochs after which a run gives up."""
    scaling: Scaling
    """How the learning rate grows with the number of workers; see ``scaled``."""


class Run(NamedTuple):
    """One run from the start to the target."""

    workers: int
    seed: int
    lr: float
    epochs: float | None
    """None: the target was not reached."""
    steps: int
    best_loss: float


def default_scaling(job: JobSpec) -> Scaling:
    """Return ``linear`` for SGD (Goyal et al. 2017) and ``sqrt`` for Adam (Malladi et al. 2022)."""
    return "linear" if job.train.optimizer == "sgd" else "sqrt"


def scaled(lr: float, workers: int, scaling: Scaling) -> float:
    """Return the learning rate for a batch ``workers`` times as large.

    >>> scaled(0.1, 4, "linear"), scaled(0.1, 4, "sqrt"), scaled(0.1, 4, "none")
    (0.4, 0.2, 0.1)
    """
    return lr * {"linear": float(workers), "sqrt": math.sqrt(workers), "none": 1.0}[scaling]


def measure_epochs(job: JobSpec, asked: Asked, log: Path, say: Say) -> list[Run]:
    """Make every run that the log does not hold yet; return all, by workers and seed.

    Raises:
        SpecError: a global batch is larger than the data, or the log is of another job, of another target, or damaged.
    """
    if job.train.lr_table is not None:
        why = "has a rate for each step of one mini-batch size, and several are trained here"
        raise SpecError("train.lr_table", why, "give lr and lr_schedule instead")
    key = _key(job, asked)
    known = {(run.workers, run.seed): run for run in _read(log, key)}
    wanted = [(n, job.train.seed + k) for n in sorted(set(asked.workers)) for k in range(asked.seeds)]
    if missing := [pair for pair in wanted if pair not in known]:
        if known:
            say(f"{len(wanted) - len(missing)} of {len(wanted)} runs are in {log}")
        with tempfile.TemporaryDirectory(prefix="raypipe-epochs-") as folder:
            device = OneDevice(job, Path(folder))
            most = max(n for n, _ in missing) * job.train.batch
            if most > device.samples:
                why = f"a step of {most} samples, but there are {device.samples} to train on"
                raise SpecError("--workers", why, "ask for fewer workers, lower train.batch, or give more data")
            for workers, seed in missing:
                lr = scaled(job.train.lr, workers, asked.scaling)
                result = device.train(workers * job.train.batch, seed, lr, asked.target, asked.most_epochs, say)
                run = Run(workers, seed, lr, result.epochs, result.steps, result.best)
                _append(log, key, run)
                known[workers, seed] = run
                say(_sentence(run, job, asked))
    return [known[pair] for pair in wanted]


def epochs_table(
    runs: Sequence[Run], speedups: dict[int, float], batch: int, target: float
) -> tuple[dict[str, Any], list[int]]:
    """Return the table for ``hybrid`` and ``autoconfigure --epochs``, and the numbers of workers left out of it.

    Epochs are the mean over the seeds. Workers of which a run did not reach the target are left out. ``batch`` is one
    worker's.
    """
    epochs, rates, left_out = {}, {}, []
    for workers in sorted({run.workers for run in runs}):
        own = [run.epochs for run in runs if run.workers == workers]
        reached = [e for e in own if e is not None]
        if len(reached) == len(own):
            epochs[str(workers)] = statistics.fmean(reached)
            rates[str(workers)] = next(run.lr for run in runs if run.workers == workers)
        else:
            left_out.append(workers)
    table: dict[str, Any] = {"mp_speedup": {str(m): s for m, s in sorted(speedups.items())}} if speedups else {}
    # Steps x workers x batch are epochs x samples, of every run that has ended.
    ended = next((run for run in runs if run.epochs), None)
    if ended is not None and ended.epochs is not None:
        table["steps_per_epoch"] = ended.steps * ended.workers / ended.epochs
    return table | {"epochs": epochs, "lr": rates, "batch": batch, "target": target}, left_out


def _sentence(run: Run, job: JobSpec, asked: Asked) -> str:
    what = f"{run.workers} workers (batch {run.workers * job.train.batch}, lr {run.lr:.3g}), seed {run.seed}"
    if run.epochs is not None:
        return f"{what}: {run.epochs:.2f} epochs, {run.steps} steps"
    return f"{what}: {asked.target} not reached in {run.steps} steps; lowest {run.best_loss:.4f}"


def _key(job: JobSpec, asked: Asked) -> str:
    """Return a digest of all that a run's result depends on, but for workers and seed."""
    train = job.train.model_dump(mode="json", exclude={"steps", "seed"})
    said = [job.model.model_dump(mode="json"), job.data.model_dump(mode="json"), train]
    text = json.dumps([*said, asked.target, asked.most_epochs, asked.scaling], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _append(log: Path, key: str, run: Run) -> None:
    try:
        with log.open("a", encoding="utf-8") as file:
            finite = run._replace(best_loss=run.best_loss if math.isfinite(run.best_loss) else 1e300)
            file.write(json.dumps({"job": key, **finite._asdict()}) + "\n")
    except OSError as error:
        raise SpecError(str(log), f"can't be written: {error.strerror}", "give another file with -o") from None


def _read(log: Path, key: str) -> list[Run]:
    fix = f"remove {log}, or give another file with -o"
    try:
        lines = read_regular(log).decode().splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(str(log), f"can't be read: {error}", fix) from None
    result = []
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
            own, run = row.pop("job"), Run(**row)
        except (ValueError, TypeError, KeyError, AttributeError):
            if number == len(lines):  # it was being written when the measurement was stopped
                write_whole(log, "".join(f"{line}\n" for line in lines[:-1]))
                break
            raise SpecError(f"{log}:{number}", "is not a run", fix) from None
        if own != key:
            raise SpecError(f"{log}:{number}", "was measured for another job, target, limit or scaling", fix)
        result.append(run)
    return result
