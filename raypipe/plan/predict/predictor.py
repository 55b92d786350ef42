"""From a candidate and the profile to its step time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import get_args

import numpy as np

from raypipe.cost.collectives import Layout, collective_seconds
from raypipe.cost.kinds import capacities, least_times, room_bytes
from raypipe.cost.memory import DeviceMemory, parameter_bytes, shares_input
from raypipe.cost.profile import Profile
from raypipe.cost.sharded_stages import with_sharding
from raypipe.cost.sizes import times_at
from raypipe.cost.stages import crowding, frozen_stages, parameters, stage_costs, trained_parameters
from raypipe.errors import ScheduleError
from raypipe.job.parallel_spec import INNERMOST, Innermost
from raypipe.job.train_spec import TrainSpec
from raypipe.plan.candidate import PARTLY, SYNCS, Asked, Candidate, Ways, candidates, in_slices
from raypipe.plan.certificate.closed import MemoryTime
from raypipe.plan.cut.exact import bottlenecks
from raypipe.plan.cut.layers import NOISE, LayerCut, Placement, cut_layers, line_of
from raypipe.plan.predict.at_scale import DIRECT, Figures, of_candidate
from raypipe.plan.predict.form import Form
from raypipe.plan.predict.kinds_cut import KindsCut
from raypipe.plan.predict.memories import Memories
from raypipe.plan.predict.oom_fallback import OOMFallback, by_device
from raypipe.plan.predict.orders import Order, Orders
from raypipe.plan.predict.prediction import Cut, Prediction
from raypipe.plan.predict.step_bound import (
    NO_COLLECTIVES,
    Lives,
    StageArrays,
    StageSeconds,
    busiest_seconds,
    least_collectives,
    least_seconds_in_memory,
    least_step_seconds,
)
from raypipe.plan.predict.step_time import StepOverheads, StepTime, step_time
from raypipe.plan.shard_ways import shard_ways
from raypipe.schedule import SCHEDULES
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, Sharding
from raypipe.schedule.passes.sync import Sync
from raypipe.schedule.shape import Grid

FINAL = 60_000
"""Tasks of a step up to which it is timed whole for what is shown in the end (else ``DIRECT``)."""
FEW_MICROBATCHES = 4
"""Micro-batches per stage below which slices are tried where memory does not ask for them."""
NEAR = 5e-3
"""Share of a step by which shards have to shorten it where memory does not ask for them."""


def without_noise(profile: Profile) -> Profile:
    """The profile, no joint backward longer than B and W apart: it does the same work in one task.

    They are measured at different moments; where the machine was busy at one of them, the choice between schedules that
    split the backward and those that do not would hang on that.
    """

    def of_kind(kind: Profile) -> Profile:
        if all(t.joint <= t.input_grad + t.weight_grad for layer in kind.layers for t in layer.times.values()):
            return kind
        layers = tuple(
            layer.model_copy(
                update={
                    "times": {
                        n: t.model_copy(update={"joint": min(t.joint, t.input_grad + t.weight_grad)})
                        for n, t in layer.times.items()
                    }
                }
            )
            for layer in kind.layers
        )
        return kind.model_copy(update={"layers": layers})

    return profile.each_kind(of_kind)


@dataclass
class Predictor:
    """Judges candidates for one job on one cluster; a ``Judge`` of the search."""

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
    _orders: Orders = field(default_factory=Orders)
    _cuts: dict[tuple[int, int], LayerCut] = field(default_factory=dict)
    _device_cuts: dict[tuple[Placement, int], Cut | None] = field(default_factory=dict)
    _norms: dict[tuple[int, int], float] = field(default_factory=dict)
    _layers: dict[int, list[float]] = field(default_factory=dict)
    _bottlenecks: dict[int, list[float]] = field(default_factory=dict)
    _whole: dict[int, tuple[float, float, float, float]] = field(default_factory=dict)
    _memory_times: dict[int, MemoryTime] = field(default_factory=dict)
    _bytes: dict[object, dict[str, Figures]] = field(default_factory=dict)
    _bounds: dict[object, float] = field(default_factory=dict)
    _lives: dict[object, Lives] = field(default_factory=dict)
    _saved: dict[tuple[int, bool], Figures] = field(default_factory=dict)
    _tables: dict[tuple[object, ...], CostTable] = field(default_factory=dict)
    _frozen: dict[Cut, tuple[int, ...]] = field(default_factory=dict)
    _trains_all: bool = field(init=False, repr=False, compare=False)
    """Every layer has a trained parameter, so no stage is frozen."""
    _memory: Memories = field(init=False, repr=False, compare=False)
    _oom_fallback: OOMFallback = field(init=False, repr=False, compare=False)
    _kinds_cut: KindsCut = field(init=False, repr=False, compare=False)
    _fastest: Profile = field(init=False, repr=False, compare=False)
    """Every layer on the kind of device that is fastest for it; ``profile`` where there is one kind."""

    def __post_init__(self) -> None:
        self._memory = Memories(self, self._orders)
        self._oom_fallback = OOMFallback(self)
        self._kinds_cut = KindsCut(self)
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
            found = None
            if times.mean() / len(placement) <= enough:
                found = cut_layers(self.layer_times(microbatch), placement, slowest_stage=max(known.stage_cost))
            self._device_cuts[key] = found.stages if found is not None and found.slowest <= enough else None
        return self._device_cuts[key]

    def recut(self, c: Candidate) -> Candidate | None:
        """See ``Judge``."""
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

    def overheads(self, c: Candidate) -> StepOverheads:
        """Return what its step has besides tasks."""
        if not self.train.needs_norm:
            return StepOverheads(copies=c.replicas)
        key = (c.stages, c.replicas)
        if key not in self._norms:
            everyone = Layout.of(range(c.groups), self.profile.placed)
            self._norms[key] = collective_seconds(self.profile, "all_reduce", 8.0, everyone)
        return StepOverheads(copies=c.replicas, norm=c.update, norm_s=self._norms[key])

    def on(self, grid: Grid) -> Iterator[Candidate]:
        """See ``Judge``. Copies divide their state where the job asks for it; where memory does, see ``oom_fallback``,
        and where it suffices, ``with_shards``."""
        for c in self._laid_out(grid):
            if self.asked.get("shard", "none") == "none":
                yield c
                if grid.microbatches < FEW_MICROBATCHES * grid.stages:  # else bubbles are short without slices
                    yield from in_slices(c, self.slices)
            else:
                yield from self.shard_ways(c)

    def _laid_out(self, grid: Grid) -> Iterator[Candidate]:
        """Candidates with a pipeline's devices as neighbours, and with those of a stage's copies where that differs."""
        ways: tuple[Innermost, ...] = get_args(Innermost)
        used = self.profile.placed.of_first(grid.stages * grid.replicas)
        if min(grid.stages, grid.replicas, len(used), max(used)) == 1 or self.profile.other_kinds:
            ways = ways[:1]
        if INNERMOST in self.asked:
            ways = (self.asked[INNERMOST],)
        for c in candidates(grid, self.most_stages, self.asked):
            yield from (c if c.innermost == way else replace(c, innermost=way) for way in ways)

    def shard_ways(self, c: Candidate, highest: int = 3) -> Iterator[Candidate]:
        """Return what the candidate's copies may divide, up to a ZeRO level; nothing where they may not."""
        if self.divides:
            yield from shard_ways(c, self.profile.placed, self.most_stages, self.asked, highest)

    def with_shards(self, p: Prediction) -> Prediction:
        """The prediction, or the fastest of those whose copies divide optimizer state, or gradients too, if that is
        faster by more than ``NEAR``: updates are shorter, and gathers may run beside forwards."""
        if p.candidate.shard != "none" or p.order is not None or p.keep is not None or p.recomputed is not None:
            return p
        found = [p]
        for way in self.shard_ways(p.candidate, 2):
            if self.least(way) < p.step_s * (1 - NEAR):
                try:
                    other = self.predict(way)
                except ScheduleError:
                    continue
                if other.fits and other.step_s < p.step_s * (1 - NEAR):
                    found.append(self.time(other, final=True))
        return min(found, key=lambda p: p.step_s)

    # Bounds

    def least_on(self, grid: Grid) -> float:
        """See ``Judge``: all work evenly on all devices, with what memory makes them recompute, and one micro-batch
        there and back."""
        group = grid.replicas if self.divides and self.asked.get("shard") != "none" and grid.tensor == 1 else 1
        room = self._most_memory - self._static(grid.stages, 3, group)
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

    @cached_property
    def _arrays(self) -> StageArrays:
        return StageArrays(self.profile, self.train)

    @cached_property
    def _least_arrays(self) -> StageArrays:
        return StageArrays(self._fastest, self.train) if self.profile.other_kinds else self._arrays

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
    def _most_memory(self) -> float:
        """Of any device."""
        return max(kind.memory_bytes for kind in self.profile.kinds)

    def _slowest(self, microbatch: int) -> list[float]:
        """By number of stages, the time of the slowest with the best cut."""
        if microbatch not in self._bottlenecks:
            self._bottlenecks[microbatch] = bottlenecks(self.layer_times(microbatch), self.most_stages)
        return self._bottlenecks[microbatch]

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

    def _static(self, stages: float, level: int = 0, group: int = 1) -> float:
        """Weights, gradients and optimizer state: some device of a pipeline holds at least so much, of which copies
        divide among ``group`` what the ZeRO level says."""
        shares = (group if level >= least else 1 for least in (3, 2, 1, 1))
        trained, frozen, process = self._held
        return (sum(part / share for part, share in zip(trained, shares, strict=True)) + frozen) / stages + process

    @cached_property
    def _held(self) -> tuple[tuple[float, ...], float, float]:
        """Bytes of the whole model: weights, gradients, optimizer state and master weights of what is trained; frozen
        weights; what a device's process takes."""
        p, layers = self.profile, range(len(self.profile.layers))
        each = parameter_bytes(p.dtype, self.train.optimizer, self.train.momentum)
        trained = trained_parameters(p, layers)
        frozen = (parameters(p, layers) - trained) * each.weight
        return tuple(float(part * trained) for part in each), float(frozen), min(k.process_bytes for k in p.kinds)

    def least(self, c: Candidate) -> float:
        """See ``Judge``."""
        return self._least(c, c.recompute != "none" or bool(self.recompute))

    def least_kept(self, c: Candidate) -> float:
        """See ``Judge``."""
        return self._least(c, False)

    def least_of_all(self, c: Candidate) -> float:
        """See ``Judge``: without collectives and updates, which copies that divide state have others of."""
        return self._least(c, c.recompute != "none" or bool(self.recompute), True)

    def _may_divide(self, c: Candidate) -> bool:
        """Return whether its copies may divide state beyond what they do."""
        alone = c.replicas == 1 or c.tensor > 1 or c.form.versions != "flush" or c.level == 3
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
        step = least_step_seconds(
            form, c.microbatches, costs, self.overheads(c), collectives=collectives, frozen=frozen
        )
        if within:
            lives, room = self._lives_of(c, form, costs, level, group)
            recomputing = recomputing and not form.recomputes
            step = max(step, least_seconds_in_memory(form, c.microbatches, costs, lives, room, recomputing, frozen))
        return step * (1 - 1e-9)

    def is_too_large(self, c: Candidate) -> bool:
        """Return whether the candidate fits in no order, whatever it recomputes, as far as is known without one."""
        return self._is_too_large(c, c.form, c.level, c.shard_group, not self.profile.other_kinds)

    def _is_too_large(self, c: Candidate, form: Form, level: int, group: int, by_stage: bool) -> bool:
        if self._static(c.stages / form.replicas, level, group) > self._most_memory:
            return True
        return by_stage and self._least_excess(c, form, level, group) > 0

    def least_excess(self, c: Candidate) -> float:
        """Return the bytes that some device lacks at least, whatever the order and the recomputation."""
        return self._least_excess(c, c.form, c.level, c.shard_group)

    def _least_excess(self, c: Candidate, form: Form, level: int, group: int) -> float:
        """The same at a ZeRO level. Beside what a device always holds, the backward of each of its stages has one
        micro-batch's activations, gathered weights, and full gradients, if that is where they are made."""
        terms, place = self.stage_bytes(c, form, level, group), np.array(form.placement)
        held = by_device(place, terms["weights"] + terms["frozen"] + terms["optimizer"])
        own = terms["kept"] - np.where(shares_input(form.placement), terms["input"], 0.0)
        own[list(self.frozen(self.cut(c)))] = 0.0
        if SCHEDULES[c.schedule].fills and form.replicas == 1:  # all others of the unit wait, recomputed at most
            waiting = (c.microbatches if c.unit is None else min(c.unit, c.microbatches)) - 1
            held = held + by_device(place, waiting * np.minimum(own, terms["input"]))
        once = own * float(form.size) + terms["gathered"] + terms["casts"] + form.joint * terms["summing"]
        np.maximum.at(most := np.zeros(len(held)), place, np.broadcast_to(once, place.shape))
        return float((held + most - room_bytes(self.profile, c.stages, c.replicas)).max())

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

    @property
    def partly(self) -> bool:
        """Return whether plans that recompute may keep some activations."""
        return "full" not in self.recompute

    def outright(self, c: Candidate) -> list[tuple[float, Candidate]] | None:
        """See ``Judge``."""
        return self._oom_fallback.outright(c)

    def unordered(self, c: Candidate) -> list[tuple[float, Candidate]] | None:
        """See ``Judge``."""
        return self._oom_fallback.unordered(c)

    def oom_fallback(self, p: Prediction) -> list[tuple[float, Candidate]]:
        """See ``Judge``."""
        return self._oom_fallback.of(p)

    def room(self, p: Prediction) -> int:
        """Activations of a stage that every device could hold beside everything else it holds."""
        return self._oom_fallback.room(p)

    # Exact figures

    def predict(self, c: Candidate, timed: bool = False) -> Prediction:
        """Memory, and the step's time if it fits (or ``timed`` asks for it); else its bound.

        Raises:
            ScheduleError: the family has no such shape.
        """
        keep = self._memory.keep(c) if c.recompute in ("full", "microbatches") else None
        recomputed = self._memory.recomputed(c) if c.recompute == "layers" else None
        found = Prediction(
            candidate=c,
            batch=self.train.batch,
            cut=self.cut(c),
            costs=self.costs(c) if recomputed is None else self.costs_with_recompute(c, c.form, recomputed),
            step_s=self.least(c),
            compute_s=0.0,
            busy_s=0.0,
            memory=self._memory.of(c, keep, recomputed),
            capacities=capacities(self.profile, c.stages, c.replicas),
            keep=keep,
            recomputed=recomputed,
            frozen=self.frozen(self.cut(c)),
        )
        return self.time(found) if found.fits or timed else found

    def costs_of(self, c: Candidate, cut: Cut, placement: Placement, split: bool) -> CostTable:
        """Costs of a cut of its own, of full micro-batches and copies that divide nothing."""
        return stage_costs(
            self.profile, cut, c.microbatch, placement, copies=c.replicas, innermost=c.innermost, split=split
        )

    def predict_order(self, c: Candidate, schedule: Schedule, cut: Cut | None = None) -> Prediction:
        """Judge an order that was searched: compute tasks of one data-parallel copy; ``cut`` where the candidate's
        placement does not say it."""
        form = Form.of(schedule, "auto")
        order = Order(schedule)
        costs = self.costs(c, form) if cut is None else self.costs_of(c, cut, form.placement, not form.joint)
        cut = self.cut(c, form) if cut is None else cut
        found = Prediction(
            candidate=c,
            batch=self.train.batch,
            cut=cut,
            costs=costs,
            step_s=0.0,
            compute_s=0.0,
            busy_s=0.0,
            memory=self._memory.of_order(c, order, cut),
            capacities=capacities(self.profile, c.stages, c.replicas),
            order=schedule,
            frozen=self.frozen(cut),
        )
        return self.time(found, final=True)

    def predict_gathers(self, p: Prediction, schedule: Schedule) -> Prediction:
        """Judge a plan of level 3 with gathers of its order's own: tasks of one data-parallel copy, AG, FREE and RS
        among them."""
        c = replace(p.candidate, gather="order")
        memory = self._memory.of_order(c, Order(schedule), p.cut, p.recomputed)
        return self.time(replace(p, candidate=c, memory=memory, order=schedule), final=True)

    def beside_shards(self, p: Prediction, schedule: Schedule) -> list[float]:
        """Return what each device holds at most without gathered weights and full gradients."""
        memory = self._memory.of_order(p.candidate, Order(schedule), p.cut, p.recomputed, beside_shards=True)
        return [device.total for device in memory]

    def bare(self, p: Prediction) -> Schedule:
        """Compute tasks of one data-parallel copy, recomputation included, without gathers."""
        c = replace(p.candidate, shard="none", gather="unit", shard_replicas=None)
        return self._orders.of(c, c.microbatches, p.keep, p.remade, self.frozen(p.cut)).schedule

    def time(self, p: Prediction, final: bool = False) -> Prediction:
        """The prediction with its step's time, gradient sums placed where it is shortest.

        No placement ends a step sooner than eager sums do, so a search needs no other. ``final``: the simplest that is
        as good and whose buffers fit, and the parts of the step.
        """
        c, costs, overheads = p.candidate, p.costs, self.overheads(p.candidate)
        frozen = self.frozen(p.cut)
        shared = p.form.replicas * c.replicas > 1

        def timed(sync: Sync) -> StepTime:
            if p.order is not None:
                return step_time(Order(p.order), costs, sync, overheads, parts=final)

            def figures(count: int, unit: int | None) -> Figures:
                order = self._orders.of(replace(c, unit=unit), count, p.keep, p.remade, frozen)
                return np.array(step_time(order, costs, sync, overheads, parts=final))

            growth = busiest_seconds(p.form, costs, frozen)
            return StepTime(*map(float, of_candidate(c, figures, FINAL if final else None, growth=growth)))

        sync = self.syncs[-1] if shared else self.syncs[0]
        best = timed(sync)
        if final and shared:
            for simpler in self.syncs[:-1]:
                found = timed(simpler)
                if found.step <= best.step * (1 + 1e-6):
                    sync, best = simpler, found
                    break
        timed_p = replace(
            p, candidate=replace(c, sync=sync), step_s=best.step, compute_s=best.compute, busy_s=best.busy
        )
        small = 3 * p.form.stages * c.microbatches <= DIRECT
        if final and shared and sync != "lazy" and p.fits and (small or p.order is not None):
            order = (
                Order(p.order) if p.order is not None else self._orders.of(c, c.microbatches, p.keep, p.remade, frozen)
            )
            if order.tasks <= DIRECT:  # sums under way beside activations
                whole = order.whole(sync, c.replicas)
                held = replace(timed_p, memory=self._memory.of_order(c, whole, p.cut, p.recomputed))
                if not held.fits and "lazy" in self.syncs:
                    lazy = timed("lazy")
                    return replace(p, step_s=lazy.step, compute_s=lazy.compute, busy_s=lazy.busy)
                return held
        return timed_p

    def schedule_of(self, p: Prediction) -> Schedule:
        """Compute tasks of one data-parallel copy."""
        if p.order is not None:
            return p.order
        return self._orders.of(p.candidate, p.candidate.microbatches, p.keep, p.remade, self.frozen(p.cut)).schedule

    def memory_with(self, c: Candidate, cut: Cut) -> tuple[DeviceMemory, ...]:
        """Memory of each device with another cut than the candidate's."""
        return self._memory.of(c, cut=cut)

    def holds(self, c: Candidate) -> bool:
        """Return whether the candidate fits, all recomputed if it recomputes; False for one that does not exist."""
        return self._memory.holds(c)

    def undivided(self, c: Candidate) -> tuple[DeviceMemory, ...] | None:
        """See ``oom_fallback.Costs``; a long step's memory is an estimate, and bounds nothing."""
        if 3 * c.form.stages * c.microbatches > DIRECT:
            return None
        try:
            return self._memory.of(replace(c, shard="none", gather="unit", shard_replicas=None))
        except ScheduleError:
            return None

    def unfit(self, c: Candidate, memory: tuple[DeviceMemory, ...]) -> Prediction:
        """See ``oom_fallback.Costs``."""
        cut = self.cut(c)
        return Prediction(
            candidate=c,
            batch=self.train.batch,
            cut=cut,
            costs=self.costs(c),
            step_s=self.least(c),
            compute_s=0.0,
            busy_s=0.0,
            memory=memory,
            capacities=capacities(self.profile, c.stages, c.replicas),
            frozen=self.frozen(cut),
        )
