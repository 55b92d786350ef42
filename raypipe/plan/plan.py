"""The plan: what the runtime reads. How the model is cut, which schedule runs it, on how many devices.

``plan.json`` in a run directory is one, and ``raypipe train --plan`` runs one unchanged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import Field, ValidationError

from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec, ParallelSpec, Spec
from raypipe.schedule import generate, stages_of
from raypipe.schedule.ir import Schedule
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate
from raypipe.schedule.passes.sync import Sync
from raypipe.schedule.shape import Shape
from raypipe.schedule.verify import verify


class Plan(Spec):
    """A decision that can be run."""

    format: Literal[1] = 1
    """Version of this file's form."""
    parallel: ParallelSpec
    """Schedule, stages, replicas, micro-batch size and the rest."""
    cut: Annotated[tuple[tuple[int, ...], ...], Field(strict=False)]
    """Per stage, the layers of the model it holds."""

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(self.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")


def load_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        SpecError: the file is missing, is no JSON, or is not a plan.
    """
    try:
        return Plan.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SpecError(str(path), f"cannot be read: {error.strerror}", "give the plan.json of a run") from None
    except ValueError as error:
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise SpecError(f"{path}: {key}", first["msg"], "use a plan that raypipe wrote") from None
        raise SpecError(str(path), f"is not JSON: {error}", "use a plan that raypipe wrote") from None


def shape_of(parallel: ParallelSpec, batch: int) -> Shape:
    """The shape of one pipeline (one data-parallel copy) of a job."""
    return Shape(
        devices=parallel.stages,
        microbatches=batch // (parallel.microbatch * parallel.replicas),
        chunks=parallel.chunks,
        unit=parallel.unit,
        pipelines=parallel.pipelines,
        concat=parallel.concat,
    )


def model_stages(job: JobSpec) -> int:
    """Parts the model is cut into under the job's schedule.

    Raises:
        ScheduleError: no such schedule, or its shape is impossible.
    """
    return stages_of(job.parallel.schedule, shape_of(job.parallel, job.train.batch))


def build_schedule(parallel: ParallelSpec, batch: int) -> Schedule:
    """The whole step over all devices: generate, replicate, place gradient syncs and updates, verify.

    Device ``w * stages + d`` is device ``d`` of data-parallel copy ``w``.

    Raises:
        ScheduleError: the shape is impossible for the schedule.
    """
    schedule = generate(parallel.schedule, shape_of(parallel, batch))
    schedule = replicate(schedule, parallel.replicas)
    schedule = place_gradient_sync(schedule, cast(Sync, parallel.sync))  # it refuses what it does not know
    schedule = add_updates(schedule)
    verify(schedule)
    return schedule


def forward_only(schedule: Schedule) -> Schedule:
    """The same placement and order with the forwards alone: what validation runs."""
    return schedule.with_orders([t for t in order if t.kind == "F"] for order in schedule.orders)
