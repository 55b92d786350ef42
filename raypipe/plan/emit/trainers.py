"""The trainers: a plan as the nearest file of one, with what that loses, and such a file as a plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from raypipe.cost.profile import Profile
from raypipe.cost.sizes import divided_sequences
from raypipe.cost.stages import as_job_runs
from raypipe.errors import RaypipeError, RequestError, SpecError
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.requested_schedule import is_file
from raypipe.job.spec import JobSpec
from raypipe.plan.cut.layers import cut_layers, line_of
from raypipe.plan.emit import automodel, deepspeed, megatron, torchtitan
from raypipe.plan.emit.layout import TrainerLayout, layers_per_block, of_blocks
from raypipe.plan.emit.nearest import Abilities, Choices, Draft, nearest
from raypipe.plan.plan import Plan
from raypipe.plan.predict.of_plan import PlanPredictor
from raypipe.plan.predict.orders import Order
from raypipe.plan.predict.prediction import Cut, PlanPrediction
from raypipe.plan.predict.predictor import Predictor, without_noise
from raypipe.plan.tensor_groups import ALONE, Sharing, sharing_of

GIB = 2**30


class Write(Protocol):
    """Writes a layout; an order that has no name goes into a file beside ``file``."""

    def __call__(self, layout: TrainerLayout, job: JobSpec, file: Path | None = None) -> str:
        """Return the trainer's file."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A trainer whose files raypipe writes and reads."""

    able: Abilities
    write: Write
    read: Callable[[str, str, int, int], TrainerLayout]
    """From text, its source, devices, and the model's layers."""
    json: bool = False
    """Its file has no comments."""


TRAINERS = {
    "megatron": Trainer(able=megatron.ABLE, write=megatron.write, read=megatron.read),
    "torchtitan": Trainer(able=torchtitan.ABLE, write=torchtitan.write, read=torchtitan.read),
    "automodel": Trainer(able=automodel.ABLE, write=automodel.write, read=automodel.read),
    "deepspeed": Trainer(able=deepspeed.ABLE, write=deepspeed.write, read=deepspeed.read, json=True),
}


class Costs:
    """The steps and the memory of a job's layouts on a cluster.

    Args:
        job: what is trained.
        profile: its costs.
        shared: profiles whose devices are groups that share each layer.
        divided: makes those that are not among them, of groups that the trainer uses otherwise than plans do.

    Raises:
        SpecError: the model is not one that the trainers number in blocks.
    """

    def __init__(
        self,
        job: JobSpec,
        profile: Profile,
        shared: Mapping[Sharing, Profile],
        divided: Callable[[Sharing], Profile] | None = None,
    ) -> None:
        self.job, self.by = job, {ALONE: profile, **{Sharing(*key): own for key, own in shared.items()}}
        self._divided = divided
        self.layers, self.devices = len(profile.layers), profile.devices
        self.per_block = layers_per_block(job, self.layers)

    def predict(self, plan: Plan) -> PlanPrediction:
        """Predict a plan's step and memory.

        Raises:
            SpecError: the costs of groups of that size are not known.
        """
        return PlanPredictor(self.job, self._of(plan.parallel)).predict(plan)

    def _of(self, p: ParallelSpec) -> Profile:
        sharing = sharing_of(p)
        other = sharing._replace(sequence_parallel=not p.sequence_parallel)
        if self._divided is not None and sharing not in self.by and other in self.by:
            self.by[sharing] = self._divided(sharing)
        if p.context > 1 and sharing not in self.by:
            if max(p.tensor, p.experts) > 1:
                why = f"the costs of context: {p.context} beside tensor: {p.tensor}, experts: {p.experts} are not known"
                raise SpecError("parallel.context", why, "use context alone, or the others")
            self.by[sharing] = divided_sequences(self.by[ALONE], p.context)
        if p.experts > 1 and sharing not in self.by:
            why = f"the costs of experts that {p.experts} copies divide are not known"
            raise SpecError("parallel.experts", why, f"known: {', '.join(str(own.experts) for own in self.by)}")
        if sharing not in self.by:
            why = f"groups of {p.tensor} devices do not divide the model, or the cluster's hosts"
            raise SpecError("parallel.tensor", why, f"known: {', '.join(str(own.tensor) for own in self.by)}")
        return self.by[sharing]

    def choices(self, layout: TrainerLayout) -> Choices:
        """Return the cuts between blocks, and the sizes of micro-batches, for a layout's groups of devices."""
        of = layout.with_keys(sub_pipelined=False).parallel
        judge = Predictor(as_job_runs(without_noise(self._of(of)), self.job.train, of), self.job.train, self.layers)

        def cut(stages: int, microbatch: int) -> Cut:
            times, each = judge.layer_times(microbatch), self.per_block
            inner = [sum(times[i : i + each]) for i in range(1, self.layers - 1, each)]
            result = cut_layers([times[0], *inner, times[-1]], line_of(stages), balance="stages")
            return of_blocks(result.stages, each)

        sizes = set.intersection(*(set(layer.times) for layer in judge.profile.layers))
        return Choices(cut, tuple(sorted(sizes)))


@dataclass(frozen=True, kw_only=True)
class Emitted:
    """A plan as a trainer's file."""

    text: str
    lost: tuple[str, ...]
    """What the trainer cannot express, and the predicted cost of that; empty if nothing."""
    layout: TrainerLayout
    """What the file says."""


def layout_of(plan: Plan, costs: Costs) -> TrainerLayout:
    """Return the layout of a plan."""
    cut = tuple(range(own[0], own[-1] + 1) for own in plan.cut)
    if [i for own in plan.cut for i in own] != list(range(cut[-1].stop)):
        raise RequestError("--emit", "the plan's stages are a graph of branches", "plan without placement: branches")
    own = plan.parallel.schedule == "auto" or plan.parallel.gather == "order" or is_file(plan.parallel.schedule)
    return TrainerLayout(
        parallel=plan.parallel,
        cut=cut,
        batch=costs.job.train.batch,
        per_block=costs.per_block,
        order=plan.order() if own else None,
    )


def emit(name: str, plan: Plan, costs: Costs, file: Path | None) -> Emitted:
    """Return a plan as the file of a trainer: of the nearest layouts that it can express, the fastest that fits.

    Args:
        name: key of ``TRAINERS``.
        plan: the plan.
        costs: of its job.
        file: where the text will be; an order that has no name is written beside it.

    Raises:
        RequestError: the trainer has no layout near the plan that fits.
    """
    trainer, job = TRAINERS[name], costs.job
    drafts = nearest(layout_of(plan, costs), trainer.able, costs.choices(layout_of(plan, costs)))
    result = [(draft, costs.predict(draft.layout.plan())) for draft in drafts]
    draft, best = min(result, key=lambda pair: (max(0.0, pair[1].excess), pair[1].step_s))
    if best.excess > 0:
        lacks = f"the nearest to the plan lacks {best.excess / GIB:.1f} GiB a device"
        why = f"{trainer.able.title} cannot express the plan: {lacks} ({'; '.join(draft.lost)})"
        raise RequestError("--emit", why, "give the planner what it has, such as --set parallel.shard=zero1")
    lost = _lost(draft, trainer, best.step_s, costs.predict(plan).step_s)
    text = trainer.write(draft.layout, job, file)
    head = [f"raypipe's nearest layout for {trainer.able.title}: predicted {best.step_s:.4g} s a step", *lost]
    return Emitted(text=_commented(text, head, trainer), lost=tuple(lost), layout=draft.layout)


def _lost(draft: Draft, trainer: Trainer, step_s: float, planned_s: float) -> list[str]:
    if not draft.lost:
        return []
    more = max(0.0, step_s / planned_s - 1)
    cost = f"predicted to take {step_s:.4g} s a step, {more:.1%} more than the plan"
    return [f"{trainer.able.title} cannot express all of the plan; what it can is {cost}:", *draft.lost]


def _commented(text: str, lines: Sequence[str], trainer: Trainer) -> str:
    if trainer.json:
        return json.dumps({"comment": list(lines), **json.loads(text)}, indent=1) + "\n"
    return "".join(f"# {line}\n" for line in lines) + text


def recognised(text: str) -> str:
    """Return the trainer whose file this is.

    >>> recognised('{"train_batch_size": 8}'), recognised("--micro-batch-size 2")
    ('deepspeed', 'megatron')
    """
    bare = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if bare and bare[0].lstrip().startswith("{"):
        return "deepspeed"
    if any(line.startswith("distributed:") for line in bare):
        return "automodel"
    return "torchtitan" if any("--parallelism." in line or "--training." in line for line in bare) else "megatron"


def read(file: Path, costs: Costs, devices: int) -> tuple[str, TrainerLayout]:
    """Read a trainer's file: its trainer's title, and its layout.

    Raises:
        SpecError: the file cannot be read, says what no plan can, or is of another model, batch or number of devices.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(str(file), f"can't be read: {error}", "give a trainer's file") from None
    trainer = TRAINERS[recognised(text)]
    blocks = (costs.layers - 2) // costs.per_block
    layout = trainer.read(text, str(file), devices, blocks)
    if layout.units != blocks + 2:
        raise SpecError(
            str(file), f"has {layout.units - 2} blocks, the job's model {blocks}", "give the file's own job"
        )
    again = layout.parallel.recompute
    layout = replace(layout, cut=of_blocks(layout.cut, costs.per_block), per_block=costs.per_block)
    if isinstance(again, tuple):
        layout = layout.with_keys(recompute=tuple(i for block in again for i in layout.layers_of(int(block) - 1)))
    batch = costs.job.train.batch
    if layout.batch != batch:
        raise SpecError(
            str(file), f"has a batch of {layout.batch}, the job {batch}", f"--set train.batch={layout.batch}"
        )
    if layout.parallel.devices > devices:
        raise SpecError(str(file), f"needs {layout.parallel.devices} devices, there are {devices}", "give --devices")
    return trainer.able.title, layout


# Explain a layout: where its step goes beside the chosen plan's, and what each of the plan's decisions saves.


CHANGES = {
    "cut": (),
    "order of tasks": ("schedule", "chunks", "placement", "unit", "pipelines", "concat", "slices", "memory_limit"),
    "division of the head": ("vocabulary",),
    "what copies divide": ("shard", "gather", "shard_replicas"),
    "when gradients are summed": ("sync",),
    "recomputation": ("recompute", "keep", "alphas"),
    "numbering of devices": ("innermost",),
}
"""Decisions of a plan, with their ``parallel`` keys, each of which may be taken alone."""
WORTH = 1e-3
"""Share of a step below which a change is not named."""


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A layout beside the chosen plan. Times in seconds, memory in bytes."""

    step_s: float
    planned_s: float
    excess: float
    """What the fullest device lacks; negative: spare."""
    parts: dict[str, tuple[float, float]]
    """Parts of the step, of the layout and of the plan; their sums are the steps."""
    saved: dict[str, float]
    """The plan's decisions that would shorten the layout's step if they were taken alone, by what they save."""

    def lines(self, what: str) -> Iterator[str]:
        """Say it in words; ``what``: the layout."""
        longer = self.step_s / self.planned_s - 1
        beside = (
            f"{longer:.1%} longer than"
            if longer > WORTH
            else f"{-longer:.1%} shorter than"
            if longer < -WORTH
            else "as long as"
        )
        yield f"{what}: predicted {self.step_s:.4g} s a step, {beside} the plan that raypipe chooses"
        if self.excess > 0:
            yield f"  it does not fit: its fullest device lacks {self.excess / GIB:.1f} GiB"
        for name, (own, planned) in self.parts.items():
            yield f"  {name}: {own:.4g} s, {planned:.4g} s in the plan"
        for name, seconds in sorted(self.saved.items(), key=lambda pair: -pair[1]):
            yield f"  with the plan's {name} alone: {seconds:.4g} s less ({seconds / self.step_s:.1%})"
        if not self.saved and longer > WORTH:
            yield "  no decision of the plan alone shortens it: they differ in how devices are divided"


def slow(layout: TrainerLayout, plan: Plan, costs: Costs) -> Slow:
    """Return what is slow about a layout.

    Raises:
        ScheduleError: it has a schedule that does not exist for its shape.
        SpecError: the costs of its tensor-parallel groups are not known.
    """
    made = layout.plan()
    own, planned = costs.predict(made), costs.predict(plan)
    own_parts, plan_parts = _parts(own, made), _parts(planned, plan)
    saved = {name: own.step_s - step_s for name, step_s in _changed(layout, layout_of(plan, costs), costs)}
    return Slow(
        step_s=own.step_s,
        planned_s=planned.step_s,
        excess=own.excess,
        parts={name: (own_parts[name], plan_parts[name]) for name in own_parts},
        saved={name: seconds for name, seconds in saved.items() if seconds > WORTH * own.step_s},
    )


def _parts(p: PlanPrediction, plan: Plan) -> dict[str, float]:
    """Where a step goes: what the mean device computes, what the busiest does beyond it, bubbles, and the rest."""
    schedule = plan.one_copy().without({"AR", "U", "AG", "RS", "FREE"})
    tasks = [list(order) for order in schedule.orders]
    bare = replace(schedule, sharding=None)
    busy = [
        Order(replace(bare, orders=tuple(order if d == at else () for at, order in enumerate(bare.orders)))).work(
            p.costs
        )
        for d in range(len(tasks))
    ]
    slowest = max(busy) - sum(busy) / len(busy)
    bubbles = max(0.0, p.compute_s - p.busy_s - slowest)
    rest = p.step_s - p.busy_s - slowest - bubbles
    return {
        "computing": p.busy_s,
        "the busiest device computes more": slowest,
        "bubbles and messages": bubbles,
        "gathers, sums and updates": rest,
    }


def _changed(layout: TrainerLayout, planned: TrainerLayout, costs: Costs) -> Iterator[tuple[str, float]]:
    """The layout with one decision of the plan at a time: its name, and the step where it fits."""
    for name, keys in CHANGES.items():
        tried = layout.with_keys(**{key: getattr(planned.parallel, key) for key in keys})
        alike = planned.parallel.stages == layout.parallel.stages
        if name == "cut":
            if not alike or len(planned.cut) != len(layout.cut):
                continue
            tried = replace(tried, cut=planned.cut)
        elif name in ("order of tasks", "division of the head"):
            if not alike:
                continue
            cut = layout.cut if len(planned.cut) == len(layout.cut) else planned.cut
            order = planned.order if name == "order of tasks" else layout.order
            tried = replace(tried, order=order, cut=cut)
        if (tried.parallel, tried.cut) == (layout.parallel, layout.cut):
            continue
        try:
            result = costs.predict(tried.plan())
        except RaypipeError:  # it takes further decisions
            continue
        if result.excess <= 0:
            yield name, result.step_s
