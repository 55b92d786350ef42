"""The least time and memory that a candidate takes, or any on a grid."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import numpy as np

from raypipe.cost.kinds import room_bytes
from raypipe.cost.memory import ParameterBytes, parameter_bytes, shares_input
from raypipe.cost.stages import crowding, expert_parameters, parameters, trained_parameters
from raypipe.plan.candidate import Candidate
from raypipe.plan.certificate.closed import MemoryTime
from raypipe.plan.predict.at_scale import Figures
from raypipe.plan.predict.candidate_costs import CandidateCosts
from raypipe.plan.predict.form import Form
from raypipe.plan.predict.oom_fallback import by_device
from raypipe.plan.predict.step_bound import (
    NO_COLLECTIVES,
    Lives,
    StageSeconds,
    least_collectives,
    least_seconds_in_memory,
    least_step_seconds,
)
from raypipe.schedule import SCHEDULES
from raypipe.schedule.costs import CostTable
from raypipe.schedule.shape import Grid


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
        each, experts, dense, frozen, process = self._held
        held = sum(part * (experts + dense / share) for part, share in zip(each, shares, strict=True))
        return (held + frozen) / stages + process

    @cached_property
    def _held(self) -> tuple[ParameterBytes, int, int, float, float]:
        """Of the whole model: bytes of a parameter; trained values of experts that copies divide, which they do not
        divide again, and of all else; bytes of frozen weights; what a device's process takes."""
        p, layers = self.profile, range(len(self.profile.layers))
        each = parameter_bytes(p.dtype, self.train.optimizer, self.train.momentum)
        trained, experts = trained_parameters(p, layers), expert_parameters(p, layers)
        frozen = float((parameters(p, layers) - trained) * each.weight)
        return each, experts, trained - experts, frozen, min(k.process_bytes for k in p.kinds)

    def least(self, c: Candidate) -> float:
        """See ``Judge``."""
        return self._least(c, c.recompute != "none" or bool(self.recompute))

    def least_kept(self, c: Candidate) -> float:
        """See ``Judge``."""
        return self._least(c, False)

    def least_of_all(self, c: Candidate) -> float:
        """See ``Judge``: without collectives and updates, which copies that divide state have others of."""
        return self._least(c, c.recompute != "none" or bool(self.recompute), True)

    def least_uncut(self, c: Candidate) -> float:
        """See ``Judge``: of joint backwards, the work of the slowest stage of the best cut, or that of the last layer
        with the way of one micro-batch through all others before and behind it."""
        if self.profile.other_kinds or not self._trains_all or c.stages == 1:
            return 0.0
        layers = self.layer_times(c.microbatch)
        slowest = self._slowest(c.microbatch)[c.stages - 1]
        work = max(c.microbatches * slowest, sum(layers) + (c.microbatches - 1) * layers[-1])
        return work * crowding(self.profile, self.profile.placed.busy(c.stages * c.replicas)) * (1 - 1e-9)

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
        once = terms["kept"] * form.size + terms["gathered"] + terms["casts"] + form.joint * terms["summing"]
        least = (held + form.replicas * once / max(held_stages.values())) / len(held_stages)
        return least * (1 - 1e-9) - max(room_bytes(self.profile, c.stages, c.replicas))

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
