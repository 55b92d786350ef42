"""When to split the model instead of adding data-parallel copies: speed-up in time to accuracy, and the tipping point.

The time to converge is C = T * S * E: time of a step, steps of an epoch, epochs. N data-parallel workers shorten an
epoch N-fold at best, but their larger global batch may need more epochs. Workers of M devices each keep the global
batch M times smaller, at the price that M devices make a worker only ``SU^M`` times as fast.

Source: Pal et al. 2019, "Optimizing Multi-GPU Parallelization Strategies for Deep Learning Training", section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field, field_validator

from raypipe.errors import SpecError
from raypipe.job.field_types import MOST_DEVICES, Devices, Spec
from raypipe.job.reading import checked, parse_yaml, read_text

if TYPE_CHECKING:
    from raypipe.job.spec import JobSpec
    from raypipe.plan.choose import Decision

Above = Annotated[float, Field(gt=1e-12, le=1e12)]
Efficiency = Annotated[float, Field(gt=1e-12, le=1)]
EXAMPLE = "jobs/epochs-inception-v3.yaml"
"""A whole table, for whoever wonders how one looks."""


class EpochsTable(Spec):
    """Facts of a model's convergence and of splitting it: the whole file of ``raypipe hybrid``."""

    mp_speedup: dict[Annotated[int, Field(ge=2, le=MOST_DEVICES)], Above] = Field(default_factory=dict)
    """Speed-up of a step when M devices share one copy of the model, by M. Only ``raypipe hybrid`` needs it."""
    epochs: Annotated[dict[Devices, Above], Field(min_length=1)]
    """Epochs until the target accuracy, by the number of data-parallel workers. Below the smallest number given, they
    are what they are there."""
    scaling_efficiency: Efficiency | Annotated[dict[Devices, Efficiency], Field(min_length=1)] = 1.0
    """T_1 / T_N, the share of the ideal throughput that N data-parallel workers reach: one number for all N, or a
    table by N as for ``epochs``. A single worker's is 1."""
    step_s: Above | None = None
    """Time of a step on one device, T_1. With ``steps_per_epoch``, times to converge are reported as well."""
    steps_per_epoch: Above | None = None
    """Steps of an epoch on one device, S_1."""
    batch: Devices | None = None
    """Samples of one worker's batch. With ``steps_per_epoch``, plans are ranked by time to the target."""
    target: float | None = None
    """Validation loss until which the epochs were measured."""
    lr: dict[Devices, Above] = Field(default_factory=dict)
    """Learning rate with which they were measured, by the number of workers."""

    @field_validator("mp_speedup", "epochs", "scaling_efficiency", "lr", mode="before")
    @classmethod
    def _whole_number_keys(cls, value: Any) -> Any:
        """JSON has only text for keys."""
        if not isinstance(value, Mapping):
            return value
        return {int(k) if isinstance(k, str) and k.isascii() and k.isdecimal() else k: v for k, v in value.items()}

    def epochs_at(self, workers: int, asked_by: str) -> float:
        """Epochs to the target with this many data-parallel workers.

        Raises:
            SpecError: the table has numbers above and none for this one; ``asked_by`` says what it was needed for.
        """
        return _look_up(self.epochs, workers, "epochs", asked_by)

    def efficiency_at(self, workers: int, asked_by: str) -> float:
        """T_1 / T_N for N workers.

        Raises:
            SpecError: as ``epochs_at``.
        """
        if workers == 1:
            return 1.0
        if isinstance(self.scaling_efficiency, float):
            return self.scaling_efficiency
        return _look_up(self.scaling_efficiency, workers, "scaling_efficiency", asked_by)


class SpeedupRow(NamedTuple):
    """Speed-ups over one device of every strategy that uses ``devices`` devices."""

    devices: int
    dp: float
    hybrid: dict[int, float | None]
    """By M; None where M does not divide the devices."""

    @property
    def best(self) -> str:
        """``dp`` or ``hybrid-M``; of equally fast ones the one that splits less."""
        known = {"dp": self.dp, **{f"hybrid-{m}": su for m, su in sorted(self.hybrid.items()) if su is not None}}
        return max(known, key=lambda name: known[name])

    @property
    def gain(self) -> float:
        """Speed-up of the best hybrid over data parallelism, minus 1; -1 where none is possible."""
        return max((su for su in self.hybrid.values() if su is not None), default=0.0) / self.dp - 1


class Comparison(NamedTuple):
    """All rows, by devices."""

    rows: tuple[SpeedupRow, ...]
    single_device_s: float | None
    """Time to converge on one device, C_1, if the table says how long a step and an epoch take."""

    @property
    def tipping_point(self) -> int | None:
        """The smallest number of devices at which a hybrid is faster than data parallelism; None if there is none."""
        return next((row.devices for row in self.rows if row.best != "dp"), None)


def compare(table: EpochsTable, devices: Iterable[int] | None = None) -> Comparison:
    """Compare data parallelism with every hybrid of the table.

    Args:
        table: epochs, speed-ups and efficiencies.
        devices: numbers of devices to compare at; None: the widths of ``table.epochs``, and halves of the smallest.

    Raises:
        SpecError: the table has no speed-ups, or does not say how many epochs, or which efficiency, one of the widths
            takes.
    """
    if not table.mp_speedup:
        raise SpecError("mp_speedup", "missing: no speed-up of a step on several devices", "add mp_speedup: {2: 1.3}")
    counts = _default_devices(table) if devices is None else sorted(set(devices))
    single = None
    if table.step_s is not None and table.steps_per_epoch is not None:
        single = table.step_s * table.steps_per_epoch * table.epochs_at(1, "one device")
    return Comparison(tuple(_row(table, count) for count in counts), single)


def workers_needed(table: EpochsTable, devices: Iterable[int] | None = None) -> set[int]:
    """Return the numbers of data-parallel workers whose efficiency a comparison at these devices uses."""
    counts = _default_devices(table) if devices is None else sorted(set(devices))
    return {*counts, *(count // split for count in counts for split in table.mp_speedup if count % split == 0)}


def load_epochs(path: str | Path) -> EpochsTable:
    """Read and check an epochs table, YAML or JSON.

    Raises:
        SpecError: the file cannot be read, or holds a wrong key or value; names the file and the key.
    """
    return epochs_from(parse_yaml(read_text(Path(path), "epochs", EXAMPLE), str(path)), str(path))


def epochs_from(mapping: object, where: str = "epochs table") -> EpochsTable:
    """Check a table given as plain data (as YAML gives it); ``where`` names its origin in errors."""
    return checked(mapping, EpochsTable, where, EXAMPLE)


def _row(table: EpochsTable, devices: int) -> SpeedupRow:
    first = table.epochs_at(1, "one device")

    def speedup(workers: int, name: str) -> float:
        asked_by = f"{name} on {devices} devices"
        return table.efficiency_at(workers, asked_by) * workers * first / table.epochs_at(workers, asked_by)

    hybrid = {
        split: None if devices % split else su * speedup(devices // split, f"hybrid-{split}")
        for split, su in sorted(table.mp_speedup.items())
    }
    return SpeedupRow(devices, speedup(devices, "data parallelism"), hybrid)


def _default_devices(table: EpochsTable) -> Sequence[int]:
    counts = set(table.epochs)
    below = min(counts)
    while below % 2 == 0:
        below //= 2
        counts.add(below)
    return sorted(counts)


def _look_up(by_workers: Mapping[int, float], workers: int, key: str, asked_by: str) -> float:
    if workers <= min(by_workers):
        return by_workers[min(by_workers)]
    if workers not in by_workers:
        given = ", ".join(map(str, sorted(by_workers)))
        raise SpecError(
            f"{key}",
            f"says nothing about {workers} workers, which {asked_by} needs; it has {given}",
            f"measure and add {workers}, or ask for other device counts with --devices",
        )
    return by_workers[workers]


# The global batch, by time to a target loss, each with its best plan.
#
# The time is that of a step x steps of an epoch x epochs until the target. A larger batch makes longer steps and fewer
# of them in an epoch, and beyond some size takes more epochs; how many is measured (``raypipe epochs``), never guessed.


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
    result, left_out, first = [], {}, None
    for batch, workers in by_batch.items():
        epochs = table.epochs[workers]
        steps = epochs * table.steps_per_epoch / workers
        own = job.model_copy(update={"train": job.train.model_copy(update={"batch": batch})})
        try:
            result.append(AtBatch(batch, epochs, steps, table.lr.get(workers), choose_plan(own)))
        except SpecError as error:
            first = first or error
            left_out[batch] = error.why
    if first is not None and not result:
        raise first
    return ByTime(target, tuple(sorted(result, key=lambda one: one.seconds)), left_out)
