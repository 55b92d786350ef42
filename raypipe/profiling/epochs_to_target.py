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
from pathlib import Path
from typing import Any, Literal, NamedTuple

from raypipe.atomic_write import write_whole
from raypipe.errors import SpecError
from raypipe.files import parse_json, read_regular
from raypipe.job import JobSpec

Scaling = Literal["linear", "sqrt", "none"]
Say = Callable[[str], None]


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
        from raypipe.profiling.one_device import OneDevice

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
                found = device.train(workers * job.train.batch, seed, lr, asked.target, asked.most_epochs, say)
                run = Run(workers, seed, lr, found.epochs, found.steps, found.best)
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
    found = []
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
        found.append(run)
    return found
