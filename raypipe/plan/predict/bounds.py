"""The cut of a candidate and the costs of its stages; from them the least time and memory that it takes, or any on a
grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from raypipe.cost.collectives import collective_seconds
from raypipe.cost.hosts import Layout
from raypipe.cost.kinds import capacities, least_times, room_bytes
from raypipe.cost.memory import DeviceMemory, StageMemory, parameter_bytes, shares_input, stage_memory
from raypipe.cost.profile import Profile
from raypipe.cost.sharded_stages import with_sharding
from raypipe.cost.sizes import times_at
from raypipe.cost.stages import crowding, frozen_stages, stage_costs
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.train_spec import TrainSpec
from raypipe.plan.candidate import PARTLY, SYNCS, Asked, Candidate, Ways
from raypipe.plan.certificate.closed import MemoryTime
from raypipe.plan.cut.exact import bottlenecks
from raypipe.plan.cut.layers import NOISE, LayerCut, Placement, cut_layers, line_of
from raypipe.plan.predict.at_scale import Figures
from raypipe.plan.predict.form import Form
from raypipe.plan.predict.kinds_cut import KindsCut
from raypipe.plan.predict.orders import Order
from raypipe.plan.predict.prediction import Cut, Prediction
from raypipe.plan.predict.step_bound import (
    NO_COLLECTIVES,
    Collectives,
    Lives,
    StageArrays,
    StageSeconds,
    least_collectives,
    least_seconds_in_memory,
    least_step_seconds,
)
from raypipe.plan.predict.step_time import StepOverheads
from raypipe.schedule import SCHEDULES
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Sharding
from raypipe.schedule.passes.sync import Sync
from raypipe.schedule.shape import Grid
from raypipe.schedule.sharding import copies_of_experts

T = TypeVar("T", Figures, float)


@dataclass
class CandidateCosts:
    """Costs of candidates for one job on one cluster."""

    profile: Profile
    train: TrainSpec
    most_stages: int
    """Deepest cut of the model."""
    syncs: tuple[Sync, ...] = SYNCS
    """Where gradient sums may be placed; the simplest of equally fast ones is taken."""
    recompute: Ways = PARTLY
    """How plans that do not fit may recompute what the schedule does not."""
    asked: Asked = field(default_factory=dict)
    """What candidates are to have."""
    slices: tuple[int, ...] = ()
    """Numbers of slices along the sequence that may be tried."""
    divides: bool = True
    """Whether data-parallel copies may divide their state (``plan.shard_ways``)."""
    _cuts: dict[tuple[int, int], LayerCut] = field(default_factory=dict)
    _device_cuts: dict[tuple[Placement, int], Cut | None] = field(default_factory=dict)
    _norms: dict[tuple[int, int], float] = field(default_factory=dict)
    _layers: dict[int, list[float]] = field(default_factory=dict)
    _bottlenecks: dict[int, list[float]] = field(default_factory=dict)
    _tables: dict[tuple[object, ...], CostTable] = field(default_factory=dict)
    _frozen: dict[Cut, tuple[int, ...]] = field(default_factory=dict)
    _trains_all: bool = field(init=False, repr=False, compare=False)
    """Every layer has a trained parameter, so no stage is frozen."""
    _kinds_cut: KindsCut = field(init=False, repr=False, compare=False)
    """The cut of devices of several kinds, which asks for the memory of one."""
    _fastest: Profile = field(init=False, repr=False, compare=False)
    """Every layer on the kind of device that is fastest for it; ``profile`` where there is one kind."""

    def __post_init__(self) -> None:
        self._fastest = least_times(self.profile)
        self._trains_all = all(layer.trained for layer in self.profile.layers)

    def layer_times(self, microbatch: int) -> list[float]:
        """Seconds of each layer for one micro-batch, there and back, on the fastest device for it."""
        if microbatch not in self._layers:
            times = self._least_arrays.times(microbatch)
            self._layers[microbatch] = (times["forward"] + times["joint"]).tolist()
        return self._layers[microbatch]

    def cut(self, c: Candidate, form: Form | None = None) -> Cut:
        """The layers of each stage; ``form`` for a candidate that no family makes."""
        form = c.form if form is None else form
        if self.profile.other_kinds:
            return self._kinds_cut.of(c, form)
        placement = form.placement
        even = None if c.balance == "stages" else self._device_cut(placement, c.microbatch)
        return self._stage_cut(len(placement[0]), c.microbatch).stages if even is None else even

    def _stage_cut(self, stages: int, microbatch: int) -> LayerCut:
        """The cut with the fastest slowest stage."""
        key = (stages, microbatch)
        if key not in self._cuts:
            slowest = self._slowest(microbatch)[stages - 1] if stages <= self.most_stages else None
            self._cuts[key] = cut_layers(
                self.layer_times(microbatch), line_of(stages), balance="stages", slowest_stage=slowest
            )
        return self._cuts[key]

    def _device_cut(self, placement: Placement, microbatch: int) -> Cut | None:
        """The cut with the fastest slowest device; None if that device is hardly faster than with balanced stages."""
        key = (placement, microbatch)
        if key not in self._device_cuts:
            known = self._stage_cut(len(placement[0]), microbatch)
            # Per device, seconds of a micro-batch, summed over the rows; no cut makes the largest less than the mean.
            times = np.bincount(np.ravel(placement), known.stage_cost * len(placement))
            enough = float(times.max()) / len(placement) * (1 - NOISE)
            result = None
            if times.mean() / len(placement) <= enough:
                result = cut_layers(self.layer_times(microbatch), placement, slowest_stage=max(known.stage_cost))
            self._device_cuts[key] = result.stages if result is not None and result.slowest <= enough else None
        return self._device_cuts[key]

    def recut(self, c: Candidate) -> Candidate | None:
        """Return the candidate with balanced devices; None if its devices are balanced already."""
        form = c.form
        if self.profile.other_kinds:  # cuts for several kinds of device balance stages
            return None
        if c.balance == "devices" or form.stages * form.replicas == c.stages:
            return None
        return replace(c, balance="devices") if self._device_cut(form.placement, c.microbatch) else None

    def frozen(self, cut: Cut) -> tuple[int, ...]:
        """The stages of a cut that have no trained parameter."""
        if self._trains_all:
            return ()
        if cut not in self._frozen:
            self._frozen[cut] = frozen_stages(self.profile, cut)
        return self._frozen[cut]

    def costs(self, c: Candidate, form: Form | None = None) -> CostTable:
        """Of each stage, for a full micro-batch; ``form`` for a candidate that no family makes."""
        form = c.form if form is None else form
        within = self.cut(c, form) if c.balance == "memory" else None
        key = (
            c.microbatch,
            form.joint,
            form.skips_first_b,
            form.placement,
            form.size,
            form.slices,
            c.replicas,
            c.innermost,
            c.balance,
            c.level,
            c.shard_group,
            within,
        )
        if key not in self._tables:
            self._tables[key] = self.costs_with_recompute(c, form)
        return self._tables[key]

    def costs_with_recompute(self, c: Candidate, form: Form, recomputed: frozenset[int] | None = None) -> CostTable:
        """Costs of the candidate's tasks in this form; ``recomputed`` are the layers that an R computes again, else
        all."""
        cut = self.cut(c, form)
        costs = stage_costs(
            self.profile,
            cut,
            c.microbatch,
            form.placement,
            copies=c.replicas,
            innermost=c.innermost,
            size=float(form.size),
            slices=form.slices,
            split=not form.joint,
            recomputed=recomputed,
        )
        frozen = self.frozen(cut)
        if form.skips_first_b:
            costs = self._with_inner_gradients(costs, cut, frozen, c.microbatch)
        if c.shard == "none":
            return costs
        levels = tuple(0 if s in frozen else c.level for s in range(form.stages))
        sharding = Sharding(levels=levels, group=c.shard_group)
        return with_sharding(costs, self.profile, cut, form.placement, sharding, c.replicas, c.innermost)

    def _with_inner_gradients(self, costs: CostTable, cut: Cut, frozen: tuple[int, ...], microbatch: int) -> CostTable:
        """The table of a family whose first stage that trains has no B: its W runs back through the stage all the same,
        and leaves out the input gradient of the first layer alone."""
        first = next(s for s in range(len(cut)) if s not in frozen)
        each = [times_at(self.profile.layers[i], microbatch).input_grad for i in cut[first]]
        inner = costs.input_grad[first] * sum(each[1:]) / sum(each) if sum(each) else 0.0
        weight = tuple(w + (inner if s == first else 0.0) for s, w in enumerate(costs.weight_grad))
        return replace(costs, weight_grad=weight)

    def costs_of(
        self, c: Candidate, cut: Cut, placement: Placement, split: bool, sharding: Sharding | None = None
    ) -> CostTable:
        """Costs of a cut of its own, of full micro-batches."""
        costs = stage_costs(
            self.profile, cut, c.microbatch, placement, copies=c.replicas, innermost=c.innermost, split=split
        )
        if sharding is None:
            return costs
        return with_sharding(costs, self.profile, cut, placement, sharding, c.replicas, c.innermost)

    @cached_property
    def _arrays(self) -> StageArrays:
        return StageArrays(self.profile, self.train)

    @cached_property
    def _least_arrays(self) -> StageArrays:
        return StageArrays(self._fastest, self.train) if self.profile.other_kinds else self._arrays

    def _slowest(self, microbatch: int) -> list[float]:
        """By number of stages, the time of the slowest with the best cut."""
        if microbatch not in self._bottlenecks:
            self._bottlenecks[microbatch] = bottlenecks(self.layer_times(microbatch), self.most_stages)
        return self._bottlenecks[microbatch]

    def overheads(self, c: Candidate | ParallelSpec, order: Order | None = None) -> StepOverheads:
        """Return what its step has besides tasks; ``order``: where the keys do not say whether it divides state."""
        if not self.train.needs_norm:
            return StepOverheads(copies=c.replicas)
        key = (c.stages, c.replicas)
        if key not in self._norms:
            everyone = Layout.of(range(c.stages * c.replicas), self.profile.placed)
            self._norms[key] = collective_seconds(self.profile, "all_reduce", 8.0, everyone)
        waits = order is not None and order.schedule.sharding is not None  # all that shards know
        return StepOverheads(copies=c.replicas, norm="wait" if waits else c.update, norm_s=self._norms[key])

    def prediction(
        self, c: Candidate, cut: Cut, costs: CostTable, memory: tuple[DeviceMemory, ...], **more: Any
    ) -> Prediction:
        """Return what is known of a candidate before its step is timed; ``more`` are further fields."""
        times = {"step_s": 0.0, "compute_s": 0.0, "busy_s": 0.0}
        return Prediction(
            candidate=c,
            batch=self.train.batch,
            cut=cut,
            costs=costs,
            memory=memory,
            capacities=capacities(self.profile, c.stages, c.replicas),
            frozen=self.frozen(cut),
            **{**times, **more},
        )


@dataclass
class Bounds(CandidateCosts):
    """Lower bounds, each known without an order."""

    _whole: dict[int, tuple[float, float, float, float]] = field(default_factory=dict)
    _memory_times: dict[int, MemoryTime] = field(default_factory=dict)
    _bytes: dict[object, dict[str, Figures]] = field(default_factory=dict)
    _bounds: dict[object, float] = field(default_factory=dict)
    _lives: dict[object, Lives] = field(default_factory=dict)
    _model_bytes: dict[tuple[int, bool, int, int], dict[str, float]] = field(default_factory=dict)
    _saved: dict[tuple[int, bool], Figures] = field(default_factory=dict)

    def least_on(self, grid: Grid) -> float:
        """Return a lower bound on the step of every candidate of the grid, infinite if none fits: all work evenly on
        all devices, with what memory makes them recompute, and one micro-batch there and back."""
        room = self.room_on(grid)
        if room < 0:
            return float("inf")
        there, back, split, inputs = self._sums(grid.microbatch)
        # Stage 0 may compute no input gradient; it takes no longer than the slowest stage of the best cut.
        least = inputs if self.profile.other_kinds else self._slowest(grid.microbatch)[grid.stages - 1]
        # Of slices, the first may be on its way there and back alone, with little attention.
        most = max(self.slices, default=1) if grid.stages > 1 else 1
        work = max(grid.microbatches * (there + min(back, split)) / grid.stages, (there + inputs - least) / most**2)
        if not self.profile.other_kinds:
            slices = max(self.slices, default=1) if grid.stages > 1 else 1
            of_memory = self._memory_time(grid.microbatch)
            work = max(work, of_memory.least(grid.microbatches, grid.stages, slices * grid.stages * room))
        busy = self.profile.placed.busy(grid.stages * grid.replicas)
        return work * min(crowding(kind, busy) for kind in self.profile.kinds) * (1 - 1e-9)

    def room_on(self, grid: Grid, again: int | None = None) -> float:
        """Return the bytes that weights, gradients and optimizer state leave on some device of any plan of the grid at
        most; negative if none fits. ``again``: see ``_static``."""
        group = grid.replicas if self.divides and self.asked.get("shard") != "none" else 1
        return self._most_room - self._static(grid.stages, 3, group, again)

    def _memory_time(self, microbatch: int) -> MemoryTime:
        """Return the time that memory costs a step, whatever the cut, for a micro-batch size.

        Activations are kept through the layers behind and back; of slices, those of the layer itself may be shorter.
        """
        if microbatch not in self._memory_times:
            layers, times = self.profile.layers, self._arrays.times(microbatch)
            first = next((n for n, layer in enumerate(layers) if layer.trained), 0)  # before it, nothing is kept
            again, kept = times["recompute"], self._arrays.kept(microbatch, True)
            there, back, split, _ = self._sums(microbatch)
            way = times["forward"] + np.minimum(times["input_grad"], times["joint"])
            lives = np.cumsum(way[::-1])[::-1] - way
            self._memory_times[microbatch] = MemoryTime(
                np.where(np.arange(len(layers)) >= first, lives * kept, 0.0),
                again if self.recompute or "schedule" in self.asked else np.full_like(again, np.inf),
                there + min(back, split),
            )
        return self._memory_times[microbatch]

    @cached_property
    def _most_room(self) -> float:
        """Memory for the model of any device."""
        return max(kind.memory_bytes - kind.process_bytes for kind in self.profile.kinds)

    def _sums(self, microbatch: int) -> tuple[float, float, float, float]:
        """Seconds of the whole model for one micro-batch: forward, joint backward, both gradients apart, the input
        gradient or the joint backward, whichever is less.
        """
        if microbatch not in self._whole:
            times, layers = self._least_arrays.times(microbatch), self._fastest.layers
            first = next((n for n, layer in enumerate(layers) if layer.trained), 0)  # no gradient goes back further
            inputs, joint = (float(times[name][first:].sum()) for name in ("input_grad", "joint"))
            trained = np.array([layer.trained > 0 for layer in layers])
            apart = inputs + float(times["weight_grad"][trained].sum())
            self._whole[microbatch] = float(times["forward"].sum()), joint, apart, min(inputs, joint)
        return self._whole[microbatch]

    def _static(self, stages: float, level: int = 0, group: int = 1, again: int | None = None) -> float:
        """Weights, gradients and optimizer state: some device of a pipeline holds at least so much, of which copies
        divide among ``group`` what the ZeRO level says, and experts among ``again``: by default all of them that hold
        the same ones."""
        again = copies_of_experts(group, self.profile.experts) if again is None else again
        own = self._whole_model.divided(level, group, again)
        return (own.state + own.gradients) / stages

    @cached_property
    def _whole_model(self) -> StageMemory:
        """The model as one stage, for what does not depend on micro-batches."""
        each = parameter_bytes(self.profile.dtype, self.train.optimizer, self.train.momentum)
        return stage_memory(self.profile, range(len(self.profile.layers)), 1, each, split=True)

    def least(self, c: Candidate) -> float:
        """Return a lower bound on the candidate's step in seconds, if it recomputes where it may; infinite if its
        weights alone do not fit."""
        return self._least(c, c.recompute != "none" or bool(self.recompute))

    def least_kept(self, c: Candidate) -> float:
        """Return the same for the candidate without recomputation besides its schedule's own."""
        return self._least(c, False)

    def least_of_all(self, c: Candidate) -> float:
        """Return a lower bound on the steps of the candidate and of all its OOM fallbacks but those in more slices:
        without collectives and updates, which copies that divide state have others of."""
        return self._least(c, c.recompute != "none" or bool(self.recompute), True)

    def least_uncut(self, c: Candidate) -> float:
        """Return a lower bound on the same steps, of a candidate with one stage a device, that needs no cut: of joint
        backwards, the work of the slowest stage of the best cut, or that of the last layer with the way of one
        micro-batch through all others before and behind it."""
        if self.profile.other_kinds or not self._trains_all or c.stages == 1:
            return 0.0
        layers = self.layer_times(c.microbatch)
        slowest = self._slowest(c.microbatch)[c.stages - 1]
        work = max(c.microbatches * slowest, sum(layers) + (c.microbatches - 1) * layers[-1])
        return work * crowding(self.profile, self.profile.placed.busy(c.stages * c.replicas)) * (1 - 1e-9)

    def _may_divide(self, c: Candidate) -> bool:
        """Return whether its copies may divide state beyond what they do."""
        alone = c.replicas == 1 or c.form.versions != "flush" or c.level == 3
        return self.divides and not alone and self.asked.get("shard") != "none"

    def memory_binds(self, c: Candidate) -> bool:
        """Return whether memory, and not its work and collectives, bounds the step of a candidate that keeps all."""
        return self.least_kept(c) > self._least(c, False, roomy=True) * (1 + 1e-9)

    def _least(self, c: Candidate, recomputing: bool, of_all: bool = False, roomy: bool = False) -> float:
        """Return a lower bound on the candidate's step.

        Args:
            c: the candidate.
            recomputing: whether it may recompute.
            of_all: the bound holds for all of its fallbacks.
            roomy: whatever the memory of its devices.
        """
        form = c.form
        level, group = (3, c.replicas) if of_all and self._may_divide(c) else (c.level, c.shard_group)
        ways = (c.innermost, c.balance, level, group, c.gather, c.update, recomputing, of_all, roomy)
        key: tuple[object, ...] = (form, c.grid, *ways, self.cut(c) if c.balance == "memory" else None)
        if key not in self._bounds:
            self._bounds[key] = self._bound(c, form, level, group, recomputing, of_all, roomy)
        return self._bounds[key]

    def _bound(
        self, c: Candidate, form: Form, level: int, group: int, recomputing: bool, of_all: bool, roomy: bool
    ) -> float:
        # A model on one device may be in several stages if copies divide it, of which fewer activations are alive.
        within = not (roomy or self.profile.other_kinds or (of_all and c.stages == 1 and level > c.level))
        if not roomy and self._is_too_large(c, form, level, group, within):
            return float("inf")
        cut = self.cut(c)
        frozen, collectives = self.frozen(cut), NO_COLLECTIVES
        costs: StageSeconds | CostTable
        if of_all and form.size == 1 and not form.skips_first_b and not self.profile.other_kinds:
            share = crowding(self.profile, self.profile.placed.busy(c.stages * c.replicas))
            costs = self._arrays.seconds(cut, c.microbatch, not form.joint, share, frozen)
        elif of_all:
            nothing = (0.0,) * form.stages
            costs = replace(self.costs(c), all_reduce=nothing, update=nothing, gather=(), reduce_scatter=())
        else:
            costs = self.costs(c)
            collectives = least_collectives(c) if c.shard != "none" else NO_COLLECTIVES
        step = self.least_step(c, costs, collectives=collectives)
        if within:
            lives, room = self._lives_of(c, form, costs, level, group)
            recomputing = recomputing and not form.recomputes
            step = max(step, least_seconds_in_memory(form, c.microbatches, costs, lives, room, recomputing, frozen))
        return step * (1 - 1e-9)

    def least_step(
        self,
        c: Candidate,
        costs: StageSeconds | CostTable,
        recompute: frozenset[int] = frozenset(),
        collectives: Collectives = NO_COLLECTIVES,
    ) -> float:
        """Return ``least_step_seconds`` of a candidate with these costs, in which these stages recompute too."""
        frozen = self.frozen(self.cut(c))
        return least_step_seconds(c.form, c.microbatches, costs, self.overheads(c), recompute, collectives, frozen)

    def is_too_large(self, c: Candidate) -> bool:
        """Return whether the candidate fits in no order, whatever it recomputes, as far as is known without one."""
        return self._is_too_large(c, c.form, c.level, c.shard_group, not self.profile.other_kinds)

    def _is_too_large(self, c: Candidate, form: Form, level: int, group: int, by_stage: bool) -> bool:
        if self._static(c.stages / form.replicas, level, group) > self._most_room:
            return True
        if not by_stage:
            return False
        return self._mean_excess(c, form, level, group) > 0 or self._least_excess(c, form, level, group) > 0

    def _mean_excess(self, c: Candidate, form: Form, level: int, group: int) -> float:
        """Return what ``_least_excess`` is at least, whatever the cut: the mean over devices.

        The bytes of stages add up to the model's or more, and the largest stage of a device is no less than its mean.
        Where memory is tight, this saves most candidates a cut, which takes milliseconds.
        """
        if not self._trains_all:  # a stage without a trained parameter keeps nothing
            return 0.0
        key = (c.microbatch, form.joint, level, group)
        if key not in self._model_bytes:
            whole = self._arrays.bytes((range(len(self.profile.layers)),), c.microbatch, not form.joint, level, group)
            self._model_bytes[key] = {name: float(each[0]) for name, each in whole.items()}
        terms, held_stages = self._model_bytes[key], Counter(chain(*form.placement))
        held = form.replicas * (terms["weights"] + terms["frozen"] + terms["optimizer"])
        once = terms["kept"] * form.size + terms["gathered"] + terms["casts"] + _gradients(c, form, terms)
        least = (held + form.replicas * once / max(held_stages.values())) / len(held_stages)
        return least * (1 - 1e-9) - max(room_bytes(self.profile, c.stages, c.replicas))

    def least_excess(self, c: Candidate) -> float:
        """Return the bytes that some device lacks at least, in a backward or before its update with all gradients."""
        return self._least_excess(c, c.form, c.level, c.shard_group, updates=True)

    def _least_excess(self, c: Candidate, form: Form, level: int, group: int, updates: bool = False) -> float:
        """The same at a ZeRO level, the latter if ``updates``. Beside what a device always holds, a stage's backward
        has one micro-batch's activations and messages, gathered weights, and gradients, if they are made there."""
        terms, place = self.stage_bytes(c, form, level, group), np.array(form.placement)
        always = by_device(place, terms["weights"] + terms["frozen"] + terms["optimizer"])
        # Before its first backward a stage does not know that those were used which it has sent.
        held = always = always + by_device(place, np.array(unanswered(c, form)) * terms["sent"])
        own = terms["kept"] - np.where(shares_input(form.placement), terms["input"], 0.0)
        untrained = list(self.frozen(self.cut(c)))
        own[untrained] = 0.0
        if any(others := waiting(c, form)):  # recomputed at most
            held = held + by_device(place, np.array(others) * np.minimum(own, terms["input"]))
        workspace = terms["workspace"].copy()
        workspace[untrained] = 0.0
        once = (own + workspace + terms["messages"]) * float(form.size) + terms["gathered"] + terms["casts"]
        once = once + _gradients(c, form, terms)
        np.maximum.at(most := np.zeros(len(held)), place, np.broadcast_to(once, place.shape))
        summed = always + by_device(place, terms["gradients"]) if updates else held
        return float((np.maximum(held + most, summed) - room_bytes(self.profile, c.stages, c.replicas)).max())

    def stage_bytes(self, c: Candidate, form: Form, level: int, group: int) -> dict[str, Figures]:
        """Return bytes by stage: see ``StageArrays.bytes``."""
        cut = self.cut(c, form)
        key = (cut, c.microbatch, form.joint, level, group)
        if key not in self._bytes:
            self._bytes[key] = self._arrays.bytes(cut, c.microbatch, not form.joint, level, group)
        return self._bytes[key]

    def _lives_of(
        self, c: Candidate, form: Form, costs: StageSeconds | CostTable, level: int, group: int
    ) -> tuple[Lives, Figures]:
        """Return the bytes of a candidate's activations, and each device's room for them at this ZeRO level."""
        cut, place = self.cut(c), np.array(form.placement)
        terms = self.stage_bytes(c, form, level, group)
        key = (cut, c.microbatch, form.joint, form.size, form.placement)
        if key not in self._lives:
            whole = np.maximum(0.0, terms["kept"] - np.where(shares_input(form.placement), terms["input"], 0.0))
            frozen = self.frozen(cut)
            whole[list(frozen)] = 0.0
            again = np.minimum(terms["input"], whole)
            saved = (whole - again) / np.maximum(np.array(costs.recompute), 1e-300)
            of_layers = self._bytes_saved(c.microbatch, not form.joint)
            saved = np.minimum(saved, np.minimum.reduceat(of_layers, [layers[0] for layers in cut]))
            self._lives[key] = Lives(whole, again, saved)
        static = terms["weights"] + terms["frozen"] + terms["optimizer"]
        alone = np.bincount(place.ravel()) == 1  # else a device may hold activations before it has all copies
        room = np.array(room_bytes(self.profile, c.stages, c.replicas)) - by_device(place, static)
        return self._lives[key], room - np.where(alone & (level < 3), by_device(place, terms["casts"]), 0.0)

    def _bytes_saved(self, microbatch: int, split: bool) -> Figures:
        """Per layer, the bytes kept of a micro-batch for each second that it is not recomputed."""
        if (microbatch, split) not in self._saved:
            seconds, kept = self._arrays.times(microbatch)["recompute"], self._arrays.kept(microbatch, split)
            self._saved[microbatch, split] = np.where(seconds > 0, kept / np.maximum(seconds, 1e-300), np.inf)
        return self._saved[microbatch, split]


def waiting(c: Candidate, form: Form) -> tuple[int, ...]:
    """Return, by stage, how many other micro-batches a device has at least run forward when one's backward begins."""
    family, unit = SCHEDULES[c.schedule], c.microbatches if c.unit is None else min(c.unit, c.microbatches)
    if family.fills and form.replicas == 1:  # all others of the unit
        return (unit - 1,) * form.stages
    if family.in_turn and form.slices == 1 and c.vocabulary == "whole":
        return tuple(min(form.stages - s, unit) - 1 for s in range(form.stages))
    return (0,) * form.stages


def unanswered(c: Candidate, form: Form) -> tuple[int, ...]:
    """Return, by stage, how many messages with its outputs are in flight at least before its first backward."""
    return waiting(c, form) if SCHEDULES[c.schedule].in_turn else (0,) * form.stages


def _gradients(c: Candidate, form: Form, terms: Mapping[str, T]) -> T | float:
    """Return bytes of gradients beside a backward that makes them, of each stage: of its second one, if it has one."""
    if not form.joint:
        return 0.0
    twice = form.versions == "flush" and c.microbatches >= 2 * form.replicas
    return terms["summing"] + terms["graded"] if twice else terms["summing"]


def by_device(place: NDArray[np.int64], each: Figures) -> Figures:
    """Sums over the stages that a device holds, of whatever replica."""
    return np.bincount(place.ravel(), np.broadcast_to(each, place.shape).ravel()).astype(float)
