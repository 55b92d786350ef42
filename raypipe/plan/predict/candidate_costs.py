"""The cut of a candidate and the costs of its stages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from raypipe.cost.collectives import collective_seconds
from raypipe.cost.hosts import Layout
from raypipe.cost.kinds import least_times
from raypipe.cost.profile import Profile
from raypipe.cost.sharded_stages import with_sharding
from raypipe.cost.sizes import times_at
from raypipe.cost.stages import frozen_stages, stage_costs
from raypipe.job.train_spec import TrainSpec
from raypipe.plan.candidate import PARTLY, SYNCS, Asked, Candidate, Ways
from raypipe.plan.cut.exact import bottlenecks
from raypipe.plan.cut.layers import NOISE, LayerCut, Placement, cut_layers, line_of
from raypipe.plan.predict.form import Form
from raypipe.plan.predict.kinds_cut import KindsCut
from raypipe.plan.predict.prediction import Cut
from raypipe.plan.predict.step_bound import StageArrays
from raypipe.plan.predict.step_time import StepOverheads
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Sharding
from raypipe.schedule.passes.sync import Sync


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

    def costs_of(self, c: Candidate, cut: Cut, placement: Placement, split: bool) -> CostTable:
        """Costs of a cut of its own, of full micro-batches and copies that divide nothing."""
        return stage_costs(
            self.profile, cut, c.microbatch, placement, copies=c.replicas, innermost=c.innermost, split=split
        )

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

    def overheads(self, c: Candidate) -> StepOverheads:
        """Return what its step has besides tasks."""
        if not self.train.needs_norm:
            return StepOverheads(copies=c.replicas)
        key = (c.stages, c.replicas)
        if key not in self._norms:
            everyone = Layout.of(range(c.groups), self.profile.placed)
            self._norms[key] = collective_seconds(self.profile, "all_reduce", 8.0, everyone)
        return StepOverheads(copies=c.replicas, norm=c.update, norm_s=self._norms[key])
