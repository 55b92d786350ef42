"""The plan: what the runtime reads. How the model is cut, which schedule runs it, on how many devices.

``plan.json`` in a run directory is one, and ``raypipe train --plan`` runs one unchanged.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from raypipe.atomic_write import write_whole
from raypipe.errors import ScheduleError
from raypipe.job.field_types import Spec
from raypipe.job.json_file import load_json
from raypipe.job.parallel_spec import JOBS_OWN, ParallelSpec
from raypipe.job.recompute_layers import Cut, layers_to_recompute
from raypipe.job.requested_schedule import base_schedule, fitting
from raypipe.job.spec import JobSpec
from raypipe.schedule.forms.text import from_text
from raypipe.schedule.ir import Schedule
from raypipe.schedule.passes import add_recompute, add_updates, keep_activations, place_gradient_sync, replicate
from raypipe.schedule.passes.sync import Sync
from raypipe.schedule.verify import verify


class MadeFor(Spec):
    """What a plan's prediction holds for: of anything else it says nothing."""

    model: dict[str, Any]
    """``model`` of the job, as JSON."""
    train: dict[str, Any]
    """``batch``, ``dtype`` and ``optimizer`` of the job."""
    device: str
    """The device whose costs it was planned with."""
    decision: str
    """Digest of what was decided, so that an edited plan is known for one."""


ORDER = "plan: order"
"""Where errors of a plan's order are, until the plan file's name is known."""


class Plan(Spec):
    """A decision that can be run."""

    format: Literal[1] = 1
    """Version of this file's form."""
    parallel: ParallelSpec
    """Schedule, stages, replicas, micro-batch size and the rest."""
    cut: Annotated[tuple[tuple[int, ...], ...], Field(strict=False)]
    """Per stage, the layers of the model it holds."""
    order: str | None = None
    """One pipeline's schedule in text form, where no name generates it: written by hand, or found by search."""

    predicted_step_s: Annotated[float, Field(gt=0)] | None = None
    """What the planner expects a step to take, in seconds; None where nobody predicted."""
    made_for: MadeFor | None = None
    """What it was planned for; None where it was not planned."""

    def planned_for(self, job: JobSpec, device: str) -> Plan:
        """This plan, with a note of what it was planned for."""
        of = _what(job)
        made = MadeFor(model=of["model"], train=of["train"], device=device, decision=self._decision())
        return self.model_copy(update={"made_for": made})

    def _decision(self) -> str:
        whole = self.model_dump(mode="json", include={"parallel", "cut", "order"})
        for key in JOBS_OWN:
            whole["parallel"].pop(key)
        return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, job: JobSpec) -> list[tuple[str, str]]:
        """How this job, or this plan, differs from what was planned: (key, why); empty where nothing is known."""
        if self.made_for is None:
            return []
        now = _what(job)
        found = [
            (f"{part}.{key}", f"was {then.get(key)}, is {now[part].get(key)}")
            for part, then in (("model", self.made_for.model), ("train", self.made_for.train))
            for key in sorted({*then, *now[part]}) if then.get(key) != now[part].get(key)
        ]  # fmt: skip
        return found if self.made_for.decision == self._decision() else [*found, ("the plan", "was edited")]

    def text(self) -> str:
        """As JSON, what a plan file holds."""
        return json.dumps(self.model_dump(mode="json"), indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Write as JSON."""
        write_whole(path, self.text())


def _what(job: JobSpec) -> dict[str, dict[str, Any]]:
    """What of a job a prediction hangs on; ``dropout`` and the like are in the model's keys."""
    train = {"batch": job.train.batch, "dtype": job.train.dtype, "optimizer": job.train.optimizer}
    return {"model": job.model.model_dump(mode="json"), "train": train}


def load_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        SpecError: the file is missing, is no JSON, or is not a plan.
    """
    return load_json(path, Plan, "raypipe autoconfigure JOB.yaml -o PLAN.json")


def build_schedule(plan: Plan, batch: int) -> Schedule:
    """The whole step over all devices: generate, replicate, place gradient syncs and updates, verify.

    Device ``w * stages + d`` is device ``d`` of data-parallel copy ``w``.

    Raises:
        ScheduleError: the shape is impossible for the schedule, or the plan's order is of another shape.
    """
    parallel = plan.parallel
    schedule = base_schedule(parallel, batch) if plan.order is None else _stored(plan, plan.order, batch)
    schedule = with_recompute(schedule, parallel, plan.cut)
    schedule = replicate(schedule, parallel.replicas)
    schedule = place_gradient_sync(schedule, cast(Sync, parallel.sync))  # it refuses what it does not know
    schedule = add_updates(schedule)
    verify(schedule)
    each = parallel.microbatch * schedule.size
    if each.denominator != 1 or each * schedule.microbatches != batch:
        raise ScheduleError(
            "microbatches", f"{schedule.microbatches} of {each} sequences are no mini-batch of {batch}",
            "choose train.batch, parallel.microbatch and parallel.replicas so that they divide",
        )  # fmt: skip
    return schedule


def _stored(plan: Plan, order: str, batch: int) -> Schedule:
    """The plan's own order of one data-parallel copy, held against the rest of the plan and the batch.

    Raises:
        ScheduleError: it is no order, cannot run, or is of another shape than the plan or the batch.
    """
    parallel = plan.parallel
    schedule = from_text(order, ORDER)
    held = schedule.microbatches * schedule.size * parallel.microbatch * parallel.replicas
    if held != batch and schedule.microbatches:
        raise ScheduleError(
            ORDER, f"holds a step of {held} sequences ({schedule.microbatches} micro-batches), train.batch is {batch}",
            f"set train.batch to {held}, or plan again for {batch}: raypipe autoconfigure JOB.yaml -o PLAN.json",
        )  # fmt: skip
    if schedule.stages != len(plan.cut):
        raise ScheduleError(
            ORDER, f"has {schedule.stages} stages, the plan's cut {len(plan.cut)}", "use a plan made for this job"
        )
    schedule = fitting(schedule, parallel, batch, ORDER)
    if schedule.versions != "flush":  # the job's rules for it were held against what its name or file says
        asked = "flush" if parallel.schedule == "auto" else base_schedule(parallel, batch).versions
        if schedule.versions != asked:
            raise ScheduleError(
                ORDER, f"has versions {schedule.versions}, and {parallel.schedule} has {asked}", "leave versions out"
            )
    return schedule


def with_recompute(schedule: Schedule, parallel: ParallelSpec, cut: Cut) -> Schedule:
    """The schedule with the recomputation that ``recompute`` and ``keep`` ask for, beside its own."""
    recomputed = layers_to_recompute(parallel, cut)
    if parallel.recompute == "full":
        schedule = add_recompute(schedule, "early")
    elif recomputed is not None:  # these layers alone
        schedule = add_recompute(schedule, "early", [])
        stages = [s for s, layers in enumerate(cut) if recomputed & set(layers)]
        schedule = add_recompute(schedule, "early", stages) if stages else schedule
    return keep_activations(schedule, parallel.keep) if parallel.keep is not None else schedule


def forward_only(schedule: Schedule) -> Schedule:
    """The same placement and order with the forwards alone: what validation runs."""
    return schedule.with_orders([t for t in order if t.kind == "F"] for order in schedule.orders)
