"""The plan: how the model is cut, which schedule runs it and on how many devices; the runtime reads it.

``plan.json`` in a run directory holds one, and ``raypipe train --plan`` runs one unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from raypipe.atomic_write import write_whole
from raypipe.cost.hosts import Numbering
from raypipe.errors import ScheduleError
from raypipe.job.field_types import Devices, Spec
from raypipe.job.json_file import load_json
from raypipe.job.parallel_spec import JOBS_OWN, GatherKey, ParallelSpec, Shard
from raypipe.job.recompute_layers import Cut, layers_to_recompute
from raypipe.job.requested_schedule import base_schedule, fitting, is_file
from raypipe.job.spec import JobSpec
from raypipe.schedule.forms.text import from_text
from raypipe.schedule.ir import Schedule
from raypipe.schedule.passes import (
    add_recompute,
    add_updates,
    closed_up,
    forwards_alone,
    keep_activations,
    place_gradient_sync,
    replicate,
    shard,
    without_frozen,
)
from raypipe.schedule.passes.sync import placement_of
from raypipe.schedule.verify import verify


class MadeFor(Spec):
    """The job and device for which a plan's prediction is valid."""

    model: dict[str, Any]
    """``model`` of the job, as JSON."""
    train: dict[str, Any]
    """``batch``, ``dtype`` and ``optimizer`` of the job."""
    device: str
    """The device whose costs it was planned with."""
    decision: str
    """Digest of the decision, so that an edited plan is recognised."""
    hosts: Annotated[tuple[Devices, ...], Field(strict=False)] = ()
    """Ranks on each host, in the order in which devices are numbered (``Plan.numbering``), as they were costed; empty:
    not known."""
    kinds: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Ray's ``accelerator_type`` of each of these hosts, where devices are of several kinds."""

    def bundle_kinds(self, together: int) -> tuple[str, ...]:
        """The kind of each bundle of ``together`` ranks, in the order in which devices are numbered; empty: any."""
        counts = zip(self.kinds, self.hosts, strict=False)
        return tuple(kind for kind, ranks in counts for _ in range(ranks // together))


ORDER = "plan: order"
"""Where errors of a plan's order are, until the plan file's name is known."""


class Plan(Spec):
    """A decision that can be run."""

    format: Literal[1] = 1
    """Version of the file format."""
    parallel: ParallelSpec
    """Schedule, stages, replicas, micro-batch size and the rest."""
    cut: Annotated[tuple[tuple[int, ...], ...], Field(strict=False)]
    """Per stage, the numbers of the model's layers that it holds."""
    order: str | None = None
    """Schedule of one pipeline in text form, if it was written by hand or searched; None if its name generates it."""

    frozen: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Stages without a trained parameter, whose gradients the schedule leaves out (``passes.without_frozen``)."""

    predicted_step_s: Annotated[float, Field(gt=0)] | None = None
    """Predicted step time in seconds; None if there is no prediction."""
    bound_s: Annotated[float, Field(ge=0)] | None = None
    """No plan that divides the devices in the same way has a shorter step, as far as is proved; None if unknown."""
    made_for: MadeFor | None = None
    """The job and device that it was planned for; None if the planner did not make it."""

    def planned_for(
        self, job: JobSpec, device: str, hosts: tuple[int, ...] = (), kinds: tuple[str, ...] = ()
    ) -> Plan:  # fmt: skip
        """Return a copy of this plan that records the job, device and ranks on each host it was planned for, and those
        hosts' kinds where there are several."""
        keys = _predicted_from(job)
        made = MadeFor(
            model=keys["model"], train=keys["train"], device=device, decision=self._decision(), hosts=hosts, kinds=kinds
        )
        return self.model_copy(update={"made_for": made})

    def _decision(self) -> str:
        # Only what differs from its default: a key that a later raypipe adds leaves the digest of older plans alone.
        decided = self.model_dump(mode="json", include={"cut", "order"})
        decided["parallel"] = self.parallel.model_dump(mode="json", exclude=set(JOBS_OWN), exclude_defaults=True)
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, job: JobSpec) -> list[tuple[str, str]]:
        """Return how the job and the plan differ from what was planned, as (key, why); empty without ``made_for``."""
        if self.made_for is None:
            return []
        now = _predicted_from(job)
        found = [
            (f"{part}.{key}", f"was {then.get(key)}, is {now[part].get(key)}")
            for part, then in (("model", self.made_for.model), ("train", self.made_for.train))
            for key in sorted({*then, *now[part]}) if then.get(key) != now[part].get(key)
        ]  # fmt: skip
        return found if self.made_for.decision == self._decision() else [*found, ("the plan", "was edited")]

    def numbering(self) -> Numbering:
        """Return which device, host by host, each device of each data-parallel copy is."""
        several = self.made_for is not None and bool(self.made_for.kinds)
        return Numbering.of(self.parallel.stages, self.parallel.replicas, self.parallel.innermost, several)

    def text(self) -> str:
        """Return the plan as JSON, the content of a plan file."""
        return json.dumps(self.model_dump(mode="json"), indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Write as JSON."""
        write_whole(path, self.text())


def _predicted_from(job: JobSpec) -> dict[str, dict[str, Any]]:
    """The job keys on which a prediction depends; ``dropout`` and the like are among the model's keys."""
    train = {"batch": job.train.batch, "dtype": job.train.dtype, "optimizer": job.train.optimizer}
    return {"model": job.model.model_dump(mode="json"), "train": train}


def load_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        SpecError: the file is missing, is not JSON, or is not a plan.
    """
    return load_json(path, Plan, "raypipe autoconfigure JOB.yaml -o PLAN.json")


def build_schedule(plan: Plan, batch: int) -> Schedule:
    """Build the schedule of a step over all devices: generate, replicate, place all-reduces and updates, verify.

    With D devices in a data-parallel copy, device ``w * D + d`` is device ``d`` of copy ``w``.

    Raises:
        ScheduleError: the schedule does not exist for the shape, or the plan's order has another shape.
    """
    parallel = plan.parallel
    schedule = sharded(replicate(one_copy(plan, batch), parallel.replicas), parallel, parallel.replicas)
    schedule = place_gradient_sync(schedule, placement_of(parallel.sync))  # raises on an unknown sync
    schedule = add_updates(schedule)
    verify(schedule)
    each = parallel.microbatch * schedule.share_of_samples
    if each.denominator != 1 or parallel.microbatch * schedule.size * schedule.microbatches != batch:
        raise ScheduleError(
            "microbatches", f"{schedule.microbatches} of {each} sequences do not make a mini-batch of {batch}",
            "choose train.batch, parallel.microbatch and parallel.replicas so that they divide",
        )  # fmt: skip
    return schedule


def one_copy(plan: Plan, batch: int) -> Schedule:
    """Build the compute tasks of one data-parallel copy, without all-reduces and updates.

    The gradients that frozen stages need not are left out, and named schedules closed up.

    An order with gathers of its own (``gather: order``) has them, and its recomputation, already.

    Raises:
        ScheduleError: as for ``build_schedule``.
    """
    schedule = base_schedule(plan.parallel, batch) if plan.order is None else _stored(plan, plan.order, batch)
    named = plan.order is None and not is_file(plan.parallel.schedule)
    schedule = left_by_frozen(schedule, plan.frozen, named and plan.parallel.shard == "none")
    if schedule.sharding is None:
        return with_recompute(schedule, plan.parallel, plan.cut)
    written = is_file(plan.parallel.schedule) or not any(task.kind == "R" for task in schedule.tasks())
    if written and plan.parallel.recompute != "none":
        raise ScheduleError(
            "recompute", "no R tasks can be added to an order that has gathers of its own",
            "write them into the order, and use recompute: none",
        )  # fmt: skip
    return schedule


def left_by_frozen(schedule: Schedule, frozen: Collection[int], close: bool) -> Schedule:
    """Leave out the gradients that frozen stages need not; ``close``: and the gaps that they leave.

    Orders that somebody wrote or searched for stay as they are, and so do those whose gathers go by their order.
    """
    less = without_frozen(schedule, frozen)
    return closed_up(less) if close and less is not schedule else less


class HasShards(Protocol):
    """What replicas divide: a job's ``parallel`` section, or a candidate for one."""

    @property
    def replicas(self) -> int:
        """Data-parallel copies."""

    @property
    def unit(self) -> int | None:
        """Micro-batches of a scheduling unit."""

    @property
    def shard(self) -> Shard:
        """What they divide."""

    @property
    def gather(self) -> GatherKey:
        """Which tasks share a gather."""

    @property
    def shard_replicas(self) -> int | None:
        """Consecutive replicas that divide a stage; None: all."""


def zero_level(shard: Shard) -> int:
    """Return the ZeRO level that a word means.

    >>> zero_level("none"), zero_level("zero3")
    (0, 3)
    """
    return 0 if shard == "none" else int(shard.removeprefix("zero"))


def sharded(schedule: Schedule, parallel: HasShards, copies: int) -> Schedule:
    """Insert the gathers and reduce-scatters that ``shard`` asks for.

    Args:
        schedule: of ``copies`` data-parallel copies: of all, or of one that stands for all.
        parallel: what they divide.
        copies: data-parallel copies that ``schedule`` holds.

    Raises:
        ScheduleError: ``gather: order``, and the order has none.
    """
    if parallel.shard == "none" or parallel.replicas == 1 or schedule.sharding is not None:
        return schedule
    if parallel.gather == "order":
        raise ScheduleError(
            "gather", "order, but the schedule's order has no gathers",
            "use step, unit or microbatch; a plan of parallel: auto, or a schedule file, may have gathers",
        )  # fmt: skip
    return shard(
        schedule, zero_level(parallel.shard), gather=parallel.gather, unit=parallel.unit, copies=copies,
        group=parallel.shard_replicas,
    )  # fmt: skip


def _stored(plan: Plan, order: str, batch: int) -> Schedule:
    """Read the plan's own order of one data-parallel copy, and check it against the plan's shape and the batch.

    Raises:
        ScheduleError: it cannot be parsed, cannot run, or differs in shape from the plan or the batch.
    """
    parallel = plan.parallel
    schedule = from_text(order, ORDER)
    samples = schedule.microbatches * schedule.size * parallel.microbatch * parallel.replicas
    if samples != batch and schedule.microbatches:
        raise ScheduleError(
            ORDER,
            f"is a step of {samples} sequences ({schedule.microbatches} micro-batches), train.batch is {batch}",
            f"set train.batch to {samples}, or plan again for {batch}: raypipe autoconfigure JOB.yaml -o PLAN.json",
        )  # fmt: skip
    if schedule.stages != len(plan.cut):
        raise ScheduleError(
            ORDER, f"has {schedule.stages} stages, the plan's cut {len(plan.cut)}", "use a plan made for this job"
        )
    schedule = fitting(schedule, parallel, batch, ORDER)
    if schedule.versions != "flush":  # the job was checked against the versions of its named schedule or file
        asked = "flush" if parallel.schedule == "auto" else base_schedule(parallel, batch).versions
        if schedule.versions != asked:
            raise ScheduleError(
                ORDER, f"has versions {schedule.versions}, and {parallel.schedule} has {asked}", "leave versions out"
            )
    return schedule


def with_recompute(schedule: Schedule, parallel: ParallelSpec, cut: Cut) -> Schedule:
    """Add the recomputation that ``recompute`` and ``keep`` ask for to the schedule's own."""
    recomputed = layers_to_recompute(parallel, cut)
    if parallel.recompute == "full":
        schedule = add_recompute(schedule, "early")
    elif recomputed is not None:  # only these layers recompute
        schedule = add_recompute(schedule, "early", [])
        stages = [s for s, layers in enumerate(cut) if recomputed & set(layers)]
        schedule = add_recompute(schedule, "early", stages) if stages else schedule
    return keep_activations(schedule, parallel.keep) if parallel.keep is not None else schedule


def forward_only(schedule: Schedule) -> Schedule:
    """Return the schedule with only its forwards, for validation, and what gathers weights for them."""
    return forwards_alone(schedule)
