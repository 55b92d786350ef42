"""The plan: how the model is cut, which schedule runs it and on how many devices; the runtime reads it.

``plan.json`` in a run directory holds one, and ``raypipe train --plan`` runs one unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from raypipe.cost.hosts import Numbering
from raypipe.errors import RaypipeError, ScheduleError, SpecError
from raypipe.files import write_whole
from raypipe.job.field_types import Devices, Spec
from raypipe.job.parallel_spec import JOBS_OWN, ParallelSpec, zero_level
from raypipe.job.reading import load_json
from raypipe.job.requested_schedule import (
    Cut,
    base_schedule,
    check_shape,
    check_shards,
    fitting,
    is_file,
    layers_to_recompute,
)
from raypipe.job.spec import JobSpec
from raypipe.plan.candidate import divisors
from raypipe.schedule import SCHEDULES
from raypipe.schedule.forms.text import from_text, to_text
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import BOOKKEEPING, SHARDED, Kind
from raypipe.schedule.passes import (
    add_recompute,
    add_updates,
    closed_up,
    keep_activations,
    place_gradient_sync,
    replicate,
    shard,
    without_frozen,
)
from raypipe.schedule.passes.sync import placement_of, stages_to_sum
from raypipe.schedule.verify import verify

if TYPE_CHECKING:
    from raypipe.plan.candidate import Candidate


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


PROGRAM = "plan: program"
"""Where errors of a plan's program are, until the plan file's name is known."""
MADE_BY = "raypipe autoconfigure JOB.yaml -o PLAN.json"
"""The command that makes a plan file."""


class Plan(Spec):
    """A decision that can be run: what a run does is here, and nothing of it is made again from the keys."""

    format: Literal[2] = 2
    """Version of the file format."""
    parallel: ParallelSpec
    """Schedule, stages, replicas, micro-batch size and the rest."""
    cut: Annotated[tuple[tuple[int, ...], ...], Field(strict=False)]
    """Per stage, the numbers of the model's layers that it holds."""
    program: str
    """The whole step of one data-parallel copy in text form (``schedule/forms/text.py``): the devices of its stages,
    weight versions, frozen stages, and what each device does in which order, collectives and updates included."""
    program_of: str
    """Digest of the ``parallel`` keys that the program was made of, so that edited ones are refused, not ignored."""
    predicted_step_s: Annotated[float, Field(gt=0)] | None = None
    """Predicted step time in seconds; None if there is no prediction."""
    bound_s: Annotated[float, Field(ge=0)] | None = None
    """No plan that divides the devices in the same way has a shorter step, as far as is proved; None if unknown."""
    made_for: MadeFor | None = None
    """The job and device that it was planned for; None if the planner did not make it."""

    @field_validator("format", mode="before")
    @classmethod
    def _no_older_one(cls, given: object) -> object:
        if given == 1:
            why = "is 1, of an older raypipe: it names a schedule, and a plan now holds the program that is run"
            raise SpecError("format", why, f"make a new one: {MADE_BY}")
        return given

    @classmethod
    def of(
        cls, parallel: ParallelSpec, cut: Cut, batch: int, order: Schedule | None = None, frozen: Collection[int] = ()
    ) -> Plan:
        """Make a plan: the one place where a schedule becomes a run's program.

        Args:
            parallel: schedule, stages, replicas and the rest.
            cut: per stage, the numbers of its layers.
            batch: ``train.batch``.
            order: compute tasks of one data-parallel copy, with gathers where ``gather: order`` says so; None: those of
                the schedule that ``parallel`` names.
            frozen: stages without a trained parameter, whose gradients are left out (``passes.without_frozen``). A
                named schedule is closed up then; orders that somebody wrote or searched for stay as they are.

        Raises:
            ScheduleError: the schedule does not exist for the shape, or the order has another one.
        """
        named = order is None and not is_file(parallel.schedule)
        copy = base_schedule(parallel, batch) if order is None else fitting(order, parallel, batch, "the order")
        copy = left_by_frozen(copy, frozen, named and parallel.shard == "none")
        if copy.sharding is None:
            copy = with_recompute(copy, parallel, cut)
        elif parallel.recompute != "none" and (
            is_file(parallel.schedule) or not any(task.kind == "R" for task in copy.tasks())
        ):
            raise ScheduleError(
                "recompute",
                "no R tasks can be added to an order that has gathers of its own",
                "write them into the order, and use recompute: none",
            )
        copy = place_gradient_sync(sharded(copy, parallel), placement_of(parallel.sync), copies=parallel.replicas)
        text = to_text(add_updates(copy))
        return cls(parallel=parallel, cut=tuple(map(tuple, cut)), program=text, program_of=_digest(_keys(parallel)))

    def remade(self, batch: int, order: Schedule | None = None, **changes: Any) -> Plan:
        """Return the plan with some ``parallel`` keys changed, or another order, and the program that follows.

        Raises:
            ScheduleError: as for ``of``.
        """
        parallel = self.parallel.model_copy(update=changes)
        made = Plan.of(parallel, self.cut, batch, self.order() if order is None else order, self.frozen)
        return self.model_copy(update={key: getattr(made, key) for key in ("parallel", "program", "program_of")})

    def one_copy(self) -> Schedule:
        """Return the program: the step of one data-parallel copy.

        Raises:
            ScheduleError: it is not in text form.
        """
        return from_text(self.program, PROGRAM)

    def order(self) -> Schedule:
        """Return the order of one data-parallel copy that ``of`` made the program of, less what frozen stages need not.

        Recomputation that ``parallel.recompute`` adds is not in it, and no sums, updates and gathers, except
        for an order with gathers of its own.

        Raises:
            ScheduleError: as for ``one_copy``.
        """
        copy, added = self.one_copy(), frozenset[Kind]({"R"} if self.parallel.recompute != "none" else ())
        if self.parallel.gather == "order" and copy.sharding is not None:
            return copy.without(BOOKKEEPING - SHARDED)
        return replace(copy.without(BOOKKEEPING | added), sharding=None)

    @property
    def frozen(self) -> tuple[int, ...]:
        """Stages without a trained parameter."""
        return self.one_copy().rules.frozen

    def planned_for(self, job: JobSpec, device: str, hosts: tuple[int, ...] = (), kinds: tuple[str, ...] = ()) -> Plan:
        """Return a copy of this plan that records the job, device and ranks on each host it was planned for, and those
        hosts' kinds where there are several."""
        keys = _predicted_from(job)
        made = MadeFor(
            model=keys["model"], train=keys["train"], device=device, decision=self._decision(), hosts=hosts, kinds=kinds
        )
        return self.model_copy(update={"made_for": made})

    def _decision(self) -> str:
        return _digest({**self.model_dump(mode="json", include={"cut", "program"}), "parallel": _keys(self.parallel)})

    def differences(self, job: JobSpec) -> list[tuple[str, str]]:
        """Return how the job and the plan differ from what was planned, as (key, why); empty without ``made_for``."""
        if self.made_for is None:
            return []
        now = _predicted_from(job)
        result = [
            (f"{part}.{key}", f"was {then.get(key)}, is {now[part].get(key)}")
            for part, then in (("model", self.made_for.model), ("train", self.made_for.train))
            for key in sorted({*then, *now[part]})
            if then.get(key) != now[part].get(key)
        ]
        return result if self.made_for.decision == self._decision() else [*result, ("the plan", "was edited")]

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


def _keys(parallel: ParallelSpec) -> dict[str, Any]:
    """Return what a plan decides where that is no default: a key that a later raypipe adds changes no digest."""
    return parallel.model_dump(mode="json", exclude=set(JOBS_OWN), exclude_defaults=True)


def _digest(decided: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]


def _predicted_from(job: JobSpec) -> dict[str, dict[str, Any]]:
    """The job keys on which a prediction depends; ``dropout`` and the like are among the model's keys."""
    train = {"batch": job.train.batch, "dtype": job.train.dtype, "optimizer": job.train.optimizer}
    return {"model": job.model.model_dump(mode="json"), "train": train}


def load_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        SpecError: the file is missing, is not JSON, or is not a plan.
    """
    return load_json(path, Plan, MADE_BY)


def build_schedule(plan: Plan, batch: int) -> Schedule:
    """Return the schedule of a step over all devices: the plan's program for each data-parallel copy, checked.

    With D devices in a data-parallel copy, device ``w * D + d`` is device ``d`` of copy ``w``.

    Raises:
        ScheduleError: the program cannot be read or run, is no whole step, or has another shape than the plan's keys,
            cut and the batch; or the keys are others than it was made of.
    """
    parallel, copy = plan.parallel, plan.one_copy()
    if plan.program_of != _digest(_keys(parallel)):
        why = "was edited since the program was made of it"
        raise ScheduleError("plan: parallel", why, f"edit the job and make a new plan: {MADE_BY}")
    each, ids = parallel.microbatch * copy.share_of_samples, copy.microbatches * parallel.sample_copies
    samples = copy.size * parallel.microbatch * ids
    if ids and (samples != batch or each.denominator != 1):
        raise ScheduleError(
            PROGRAM,
            f"is a step of {samples} sequences ({copy.microbatches} micro-batches of {each}), train.batch is {batch}",
            f"set train.batch to {samples}, or plan again for {batch}: {MADE_BY}",
        )
    if copy.stages != len(plan.cut):
        raise ScheduleError(
            PROGRAM, f"has {copy.stages} stages, the plan's cut {len(plan.cut)}", "use a plan made for this job"
        )
    check_shape(copy, parallel, batch, PROGRAM)
    check_shards(copy, parallel, PROGRAM, parallel.shard if parallel.replicas > 1 else "none")
    if parallel.schedule == "auto" and copy.versions != "flush":  # the job was checked against a synchronous one
        raise ScheduleError(PROGRAM, f"has versions {copy.versions}, and auto has flush", "leave versions out")
    schedule = replicate(copy, parallel.replicas)
    verify(schedule)
    for kind, stages in (("AR", stages_to_sum(schedule)), ("U", set(range(schedule.stages)))):
        if wrong := stages ^ {task.stage for task in schedule.tasks() if task.kind == kind}:
            missing = min(wrong) in stages
            raise ScheduleError(
                PROGRAM, f"has {'no' if missing else 'a'} {min(wrong)}{kind}", f"{'add' if missing else 'remove'} it"
            )
    return schedule


def left_by_frozen(schedule: Schedule, frozen: Collection[int], close: bool) -> Schedule:
    """Leave out the gradients that frozen stages need not; ``close``: and the gaps that they leave.

    Orders that somebody wrote or searched for stay as they are, and so do those whose gathers go by their order.
    """
    less = without_frozen(schedule, frozen)
    return closed_up(less) if close and less is not schedule else less


def sharded(schedule: Schedule, parallel: ParallelSpec | Candidate) -> Schedule:
    """Insert the gathers and reduce-scatters that ``shard`` asks for into the schedule of one data-parallel copy.

    Raises:
        ScheduleError: ``gather: order``, and the order has none.
    """
    if parallel.shard == "none" or parallel.replicas == 1 or schedule.sharding is not None:
        return schedule
    if parallel.gather == "order":
        raise ScheduleError(
            "gather",
            "order, but the schedule's order has no gathers",
            "use step, unit or microbatch; a plan of parallel: auto, or a schedule file, may have gathers",
        )
    return shard(
        schedule, zero_level(parallel.shard), gather=parallel.gather, unit=parallel.unit, group=parallel.shard_replicas
    )


def with_recompute(schedule: Schedule, parallel: ParallelSpec, cut: Cut) -> Schedule:
    """Add the recomputation that ``recompute`` and ``keep`` ask for to the schedule's own."""
    recomputed = layers_to_recompute(parallel, cut)
    if parallel.recompute == "full":
        blocks = range(parallel.stages) if parallel.vocabulary == "split" else None  # shares keep no logits anyway
        schedule = add_recompute(schedule, "early", blocks)
    elif recomputed is not None:  # only these layers recompute
        schedule = add_recompute(schedule, "early", [])
        stages = [s for s, layers in enumerate(cut) if recomputed & set(layers)]
        schedule = add_recompute(schedule, "early", stages) if stages else schedule
    return keep_activations(schedule, parallel.keep) if parallel.keep is not None else schedule


# A plan that needs less memory than one that ran out of it, for the same devices and with the same results.


def less_memory(job: JobSpec, plan: Plan, whole_minibatches: bool = False) -> tuple[Plan, str] | None:
    """Return the plan that gives up least time for memory, and what changes; None if there is none.

    First all activations are recomputed, then micro-batches get smaller. Gathers of an order's own fill a device's
    memory, so they give way to one every micro-batch. Cut, stages and replicas stay, so that the
    run's devices and its checkpoints serve. There is no prediction for the plan: it was made from what happened, which
    the plan before was predicted to fit.

    Args:
        job: the job.
        plan: what ran out of memory.
        whole_minibatches: whether the loss depends on the size of micro-batches (batch norm), so that it must stay.
    """
    for parallel, order, words in _changes(plan, whole_minibatches):
        try:
            JobSpec.model_validate({**job.model_dump(), "parallel": parallel.model_dump()})
            result = Plan.of(parallel, plan.cut, job.train.batch, order, plan.frozen)
            build_schedule(result, job.train.batch)
        except (RaypipeError, ValueError):
            continue
        return result, words
    return None


def _changes(plan: Plan, whole_minibatches: bool) -> Iterator[tuple[ParallelSpec, Schedule | None, str]]:
    """Yield other ``parallel`` keys, the order that they are for (None: the named one), and words for what changes."""
    parallel, order = plan.parallel, plan.order()
    if parallel.gather == "order":
        order = replace(order.without(SHARDED), sharding=None)
        parallel = parallel.model_copy(update={"gather": "microbatch"})
        yield parallel, order, "gathers every micro-batch instead of the plan's own"
    if parallel.recompute != "full" or parallel.keep is not None:
        keys: dict[str, Any] = {"recompute": "full", "keep": None, "alphas": None}
        keys["memory_cap_mb"] = parallel.memory_cap_mb if parallel.postpones else None
        yield parallel.model_copy(update=keys), order, f"recompute: full instead of {_said(parallel.recompute)}"
    if not whole_minibatches and parallel.schedule in SCHEDULES:  # another order is for so many micro-batches
        for size in reversed(divisors(parallel.microbatch)[:-1]):
            changed = parallel.model_copy(update={"microbatch": size})
            yield changed, None, f"micro-batches of {size} instead of {parallel.microbatch}"


def _said(recompute: object) -> str:
    return recompute if isinstance(recompute, str) else "some layers"
