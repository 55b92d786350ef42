"""A job that is being prepared: its model, built once, then its plan, and at last everything that a run needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from raypipe.cost.analytic import GIB
from raypipe.cost.profile import Slicing
from raypipe.errors import CaptureError, SpecError, nearest
from raypipe.graph.counted import ON_CPU
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.spec import JobSpec
from raypipe.job.train_spec import NO_MUON, TrainSpec
from raypipe.observe.run_record import OF_TEXT, Units
from raypipe.partition.this_machine import this_machine
from raypipe.plan.plan import Plan
from raypipe.plan.predict.of_plan import PlanPredictor
from raypipe.schedule.ir import Schedule

if TYPE_CHECKING:
    from raypipe.models import Field, LayeredModel, Task
    from raypipe.runtime.executor.metrics import ValidationMetrics


class JobModel:
    """Builds a job's model and caches it.

    With a fixed ``parallel.tensor``, layers are one tensor rank's share; where the planner chooses, they are complete.
    """

    def __init__(self, job: JobSpec) -> None:
        self.job = job
        self._built: list[tuple[Mapping[str, Field] | None, LayeredModel]] = []

    @cached_property
    def declared(self) -> LayeredModel:
        """The model for the data that the job names.

        Raises:
            SpecError: the data cannot be read, or the model does not exist or does not fit the data.
            CaptureError: the model cannot be captured.
        """
        from raypipe.data import declared_fields

        return self._for(declared_fields(self.job.data))

    def prepared(self, data: Path) -> LayeredModel:
        """Build the model for the data prepared in a folder; a resumed run keeps these even if its job names others.

        Raises:
            SpecError, CaptureError: as ``declared``.
        """
        from raypipe.data import known_fields

        return self._for(known_fields(data))

    def _for(self, fields: Mapping[str, Field] | None) -> LayeredModel:
        from raypipe.models import build_model

        for known, model in self._built:
            if known == fields:
                return model
        planned = self.job.parallel.auto
        if planned and self.job.parallel.experts > 1:  # so that experts that do not divide are known before any plan
            build_model(self.job, fields, tensor_rank=0)
        model = build_model(self.job, fields, tensor_rank=None if planned else 0)
        self._built.append((fields, model))
        return model


@dataclass(frozen=True, slots=True)
class Planned:
    """A job, its plan, and the schedule of the plan."""

    job: JobSpec
    """The job with the plan's ``parallel`` keys."""
    model: JobModel
    plan: Plan
    schedule: Schedule
    """The whole step over all devices."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job that is ready to run: all errors that a request can have were checked."""

    job: JobSpec
    model: LayeredModel
    """The model for the prepared data."""
    plan: Plan
    schedule: Schedule
    """The whole step over all devices."""
    directory: Path
    resume: bool
    asked: JobSpec
    """The job as it was given: its ``parallel`` keys leave to the planner what the plan has decided."""
    units: Units = OF_TEXT
    validation: ValidationMetrics | None = None
    """Functions of the Python API for figures of a validation."""


def units_of(task: Task, job: JobSpec, data: Path) -> Units:
    """Return the units of loss and throughput for the data prepared in the folder ``data``."""
    from raypipe.data import counts_tokens

    return Units(task.unit, "tokens" if counts_tokens(job, data) else "samples")


def check_groups(train: TrainSpec, model: LayeredModel, say: Callable[[str], None]) -> None:
    """Say which names no layer has: a parameter that forward does not read is not trained.

    Raises:
        SpecError: a tied parameter has several names, and a group has not got all of them; or nothing matches a pattern
            that is not a usual one.
    """
    if train.optimizer == "muon":
        _check_muon(train, model, say)
    group_of = {name: number for number, group in enumerate(train.groups) for name in group.parameters}
    if not group_of:
        return
    for tie in model.tied:
        names = dict.fromkeys(name for _, name in tie.parameters)
        if len({group_of.get(name) for name in names}) > 1:
            why = f"{' and '.join(names)} are one parameter, and not in one group"
            raise SpecError("train.groups", why, "name all of them in the same group")
    known = {name for i in range(model.count) for name in model.parameter_names(i)}
    if unknown := [name for name in group_of if name not in known]:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        say(f"note: train.groups: no layer of the model has a parameter {unknown[0]}{more}")


def _check_muon(train: TrainSpec, model: LayeredModel, say: Callable[[str], None]) -> None:
    names = list(dict.fromkeys(name for i in range(model.count) for name in model.parameter_names(i)))
    for pattern in train.muon_excludes:
        if pattern not in NO_MUON and not any(fnmatchcase(name, pattern) for name in names):
            fix = f"leave it out; parameters are named as {names[0]} and {names[-1]}"
            raise SpecError("train.muon_excludes", f'no parameter matches "{pattern}"', fix)
    left = [name for name in names if any(fnmatchcase(name, pattern) for pattern in train.muon_excludes)]
    shown = ", ".join(left[:6]) + (f" and {len(left) - 6} more" if len(left) > 6 else "") if left else "none"
    say(f"note: AdamW updates what is no matrix, and of what train.muon_excludes matches: {shown}")


def check_slices(
    parallel: ParallelSpec, model: LayeredModel, data: Path, job: JobSpec, validation: ValidationMetrics | None
) -> None:
    """Raise an error if the plan cuts micro-batches along a sequence, or copies divide it, and this job cannot."""
    key, parts = ("context", "parts") if parallel.context > 1 else ("slices", "slices")
    if parallel.slices == parallel.context == 1:
        return
    from raypipe.data import open_data, token_budget
    from raypipe.runtime.executor.metrics import validation_metrics

    if parallel.context > 1:
        model.chunk_lengths(parallel.context)
    else:
        model.slice_lengths(parallel.slices)
    if model.packed and parallel.slices > 1:
        why = "rows of several documents are not cut into slices"
        raise SpecError("parallel.slices", why, "use slices: 1, or give each document a row of its own")
    budget = token_budget(job, parallel.sample_copies, model)
    if budget is None and open_data(data, model.task).lengths("train", job.train.seed, 0, job.train.batch):
        why = f"the samples differ in length, and {parts} of a micro-batch are of one length"
        raise SpecError(f"parallel.{key}", why, f"use {key}: 1, or samples of one length")
    if (validation or validation_metrics(job.train)) is not None:
        why = f"a micro-batch's predictions come in {parts}, and functions for figures want them whole"
        raise SpecError("train.metrics", why, f"leave it out, or use parallel.{key}: 1")


def check_compiler(job: JobSpec) -> None:
    """Raise an error if the job wants stages compiled and this host cannot."""
    from raypipe.runtime.compiled.toolchain import missing_toolchain

    if job.train.compile == "inductor" and (why := missing_toolchain()) is not None:
        raise SpecError(
            "train.compile", why, "install g++ and Python's headers (or name another compiler in CXX), or use none"
        )


def check_metrics(job: JobSpec, model: JobModel, validation: ValidationMetrics | None) -> None:
    """Raise an error if figures of a validation are asked for that nothing can compute."""
    from raypipe.runtime.executor.metrics import validation_metrics

    best = job.train.best_metric
    if (validation or validation_metrics(job.train)) is not None:
        if not model.declared.task.predicts:
            why = "the model ends with its loss, so there are no predictions"
            raise SpecError("train.metrics", why, "leave it out, or train with model.loss: task")
        return
    figures = model.declared.task.figures if best != "loss" else (best,)
    if not figures:
        why = f"{best}, but no function computes figures of a validation"
        raise SpecError("train.best_metric", why, "give the function in train.metrics, or use loss")
    if best not in figures:
        why = f"{best} is not among the figures of the loss function, {', '.join(figures)}"
        raise SpecError("train.best_metric", why, nearest(best, figures))


def check_host_memory(prepared: Prepared) -> str | None:
    """Hold a plan against the memory of this host, whose processor cores are all of its devices.

    An operating system gives out more memory than it has and ends a process that touches too much of it, so what
    cannot fit is refused before it starts.

    Returns:
        A warning where the plan may need more than there is: activations are computed, not measured. None where it
        fits, or where its layers have no computed costs.

    Raises:
        SpecError: weights, gradients and optimizer state alone are larger than the memory.
    """
    from raypipe.models import GptLayers
    from raypipe.partition.job_costs import divided_profile, job_profile
    from raypipe.partition.partition_job import JobPieces

    job, plan, model = prepared.job, prepared.plan, prepared.model
    parallel = plan.parallel
    copies = parallel.replicas * parallel.tensor
    host = this_machine(job.train.dtype, prepared.schedule.devices * parallel.tensor, timed=False)
    try:
        if isinstance(model, GptLayers):
            whole = parallel.tensor == 1
            profile = job_profile(job, host) if whole else divided_profile(job, host, parallel.tensor)
        else:
            from raypipe.models.captured import CapturedModel
            from raypipe.partition.pieces import pieces_of, tensor_ranks_of

            if not isinstance(model, CapturedModel):
                return None
            # The layers are a tensor rank's share, where such ranks divide them.
            pieces = JobPieces(
                pieces_of(model, parallel.microbatch), tensor_ranks_of(job, model, ON_CPU), Slicing(positions=1)
            )
            profile = job_profile(job, host, pieces=pieces)
        each = PlanPredictor(job, profile).predict(plan).memory
    except (CaptureError, SpecError):
        return None
    room = host.device.memory_gib * host.devices
    state = sum(d.weights + d.gradients + d.optimizer + d.versions + d.replicas for d in each) * copies / GIB
    need = sum(d.total for d in each) * copies / GIB
    if state <= room:
        words = f"the plan is predicted to take {need:.1f} GiB of this host's {room:.1f}: it may run out of memory"
        return words if need > room else None
    fixes = ["a smaller model", "a host with more memory"]
    if job.train.optimizer != "sgd" and state - sum(d.optimizer for d in each) * copies / GIB <= room:
        fixes.insert(0, "train.optimizer: sgd")
    if parallel.shard == "none" and state / parallel.replicas <= room:
        fixes.insert(0, "parallel.shard: zero3")
    held = f"its {host.devices} devices" if host.devices > 1 else "its device"
    why = f"weights, gradients and optimizer state of {held} take {state:.1f} GiB, and this host has {room:.1f}"
    raise SpecError("memory", why, f"use {', '.join(fixes[:-1])} or {fixes[-1]}")
