"""From a candidate and the profile to its step time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.cost.collectives import Layout, collective_seconds
from raypipe.cost.memory import STATES, DeviceMemory, device_memory
from raypipe.cost.profile import Profile
from raypipe.cost.sizes import times_at
from raypipe.cost.stages import crowding, gradient_width, parameters, stage_costs
from raypipe.errors import ScheduleError
from raypipe.job.recompute import again_after
from raypipe.job.spec import TrainSpec
from raypipe.plan.at_scale import Figures, at_scale
from raypipe.plan.bounds import least_step_seconds
from raypipe.plan.candidate import NOTHING, SYNCS, Asked, Candidate, Grid, candidates
from raypipe.plan.cut import Cut, balanced_cut, bottlenecks
from raypipe.plan.form import Form
from raypipe.plan.orders import Keep, Order, Orders
from raypipe.plan.prediction import Prediction, stages_of
from raypipe.plan.step_time import Around, StepTime, step_time
from raypipe.schedule import SCHEDULES
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.passes.sync import Sync

DIRECT = 30_000
"""Tasks of a step up to which it is timed whole."""
TERMS = tuple(DeviceMemory().terms())
FINAL = 60_000
"""The same for what is shown in the end."""
LONGEST = 120_000
"""Tasks of a step above which it is timed from shorter ones in any case: half a second."""
LIMITS = 4
"""Memory limits that are tried with recomputation."""
LEVELS = 16
"""Shares of micro-batches kept are multiples of one in so many."""


def without_noise(profile: Profile) -> Profile:
    """The profile, no joint backward longer than B and W apart: it does the same work in one task.

    They are measured at different moments; where the machine was busy at one of them, the choice between schedules that
    split the backward and those that do not would hang on that.
    """
    layers = tuple(
        layer.model_copy(
            update={
                "times": {
                    n: t.model_copy(update={"joint": min(t.joint, t.input_grad + t.weight_grad)})
                    for n, t in layer.times.items()
                }
            }
        )
        for layer in profile.layers
    )
    return profile.model_copy(update={"layers": layers})


class _Held(NamedTuple):
    """Bytes of each stage; of one micro-batch where that matters."""

    weights: Figures
    casts: Figures
    """Narrow copies of the weights."""
    summed: Figures
    """Gradients as one flat vector."""
    leaving: Figures
    """What it hands on."""
    kept: Figures
    """From the forward to the backward."""
    waiting: Figures
    """From B to W."""


@dataclass(slots=True)
class Predictor:
    """Judges candidates for one job on one cluster; a ``Judge`` of the search."""

    profile: Profile
    train: TrainSpec
    most_stages: int
    """Deepest cut of the model."""
    syncs: tuple[Sync, ...] = SYNCS
    """Where gradient sums may be placed; the simplest of equally fast ones is taken."""
    recompute: bool = True
    """Whether plans may recompute what the schedule does not."""
    partly: bool = True
    """Whether stages that recompute may keep the activations of as many micro-batches as memory holds."""
    asked: Asked = NOTHING
    """What candidates are to have."""
    _orders: Orders = field(default_factory=Orders)
    _cuts: dict[tuple[int, int], Cut] = field(default_factory=dict)
    _norms: dict[tuple[int, int], float] = field(default_factory=dict)
    _layers: dict[int, list[float]] = field(default_factory=dict)
    _bottlenecks: dict[int, list[float]] = field(default_factory=dict)
    _whole: dict[int, tuple[float, float, float, float]] = field(default_factory=dict)
    _tables: dict[tuple[object, ...], CostTable] = field(default_factory=dict)
    _stage_bytes: dict[tuple[int, int], _Held] = field(default_factory=dict)

    def layer_times(self, microbatch: int) -> list[float]:
        """Seconds of each layer for one micro-batch, there and back."""
        if microbatch not in self._layers:
            times = [times_at(layer, microbatch) for layer in self.profile.layers]
            self._layers[microbatch] = [t.forward + t.joint for t in times]
        return self._layers[microbatch]

    def cut(self, stages: int, microbatch: int) -> Cut:
        """The layers of each stage: the slowest as fast as can be."""
        key = (stages, microbatch)
        if key not in self._cuts:
            slowest = self._slowest(microbatch)[stages - 1] if stages <= self.most_stages else None
            self._cuts[key] = balanced_cut(self.layer_times(microbatch), stages, slowest)
        return self._cuts[key]

    def costs(self, c: Candidate, form: Form | None = None) -> CostTable:
        """Of each stage, for a full micro-batch; ``form`` for a candidate that no family makes."""
        form = c.form if form is None else form
        key = (c.microbatch, form.joint, form.placement, form.size, c.replicas)
        if key not in self._tables:
            self._tables[key] = self._stage_costs(c, form)
        return self._tables[key]

    def _stage_costs(self, c: Candidate, form: Form, again: frozenset[int] | None = None) -> CostTable:
        return stage_costs(
            self.profile, self.cut(form.stages, c.microbatch), c.microbatch, form.placement, copies=c.replicas,
            size=float(form.size), split=not form.joint, again=again,
        )  # fmt: skip

    def around(self, c: Candidate) -> Around:
        """What its step has besides tasks."""
        if self.train.clip is None:
            return Around(copies=c.replicas)
        key = (c.stages, c.replicas)
        if key not in self._norms:
            everyone = Layout.of(range(c.groups), self.profile.devices_per_host)
            self._norms[key] = collective_seconds(self.profile, "all_reduce", 8.0, everyone)
        return Around(copies=c.replicas, norm=c.update, norm_s=self._norms[key])

    def on(self, grid: Grid) -> Iterator[Candidate]:
        """See ``Judge``."""
        return candidates(grid, self.most_stages, self.asked)

    # Bounds

    def least_on(self, grid: Grid) -> float:
        """See ``Judge``: all work evenly on all devices, and one micro-batch there and back."""
        if self._static(grid.stages) > self.profile.memory_bytes:
            return float("inf")
        there, back, split, inputs = self._sums(grid.microbatch)
        # Stage 0 may compute no input gradient; it takes no longer than the slowest stage of the best cut.
        least = self._slowest(grid.microbatch)[grid.stages - 1]
        work = max(grid.microbatches * (there + min(back, split)) / grid.stages, there + inputs - least)
        return work * crowding(self.profile, grid.stages * grid.replicas) * (1 - 1e-9)

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
            times = [times_at(layer, microbatch) for layer in self.profile.layers]
            inputs = sum(t.input_grad for t in times)
            joint = sum(t.joint for t in times)
            apart = inputs + sum(t.weight_grad for t in times)
            self._whole[microbatch] = sum(t.forward for t in times), joint, apart, min(inputs, joint)
        return self._whole[microbatch]

    def _static(self, stages: float) -> float:
        """Weights, gradients and optimizer state: some device of a pipeline holds at least so much."""
        p = self.profile
        values = sum(layer.parameters for layer in p.layers) - p.tied_parameters
        states = STATES[self.train.optimizer] + (self.train.optimizer == "sgd" and self.train.momentum > 0)
        return (2 + states) * gradient_width(p.dtype) * values / stages + p.base_bytes

    def least(self, c: Candidate) -> float:
        """See ``Judge``."""
        form = c.form
        if self._static(c.stages / form.replicas) > self.profile.memory_bytes:
            return float("inf")
        return least_step_seconds(form, c.microbatches, self.costs(c), self.around(c)) * (1 - 1e-9)

    def outright(self, c: Candidate) -> list[tuple[float, Candidate]] | None:
        """See ``Judge``: what a device holds once its gradients are there and while they are summed, whatever is done
        about activations; and with all activations of a unit, where the family runs its forwards first."""
        form, capacity = c.form, self.profile.memory_bytes
        place = np.array(form.placement)
        own = self._held(form.stages, c.microbatch)
        states = STATES[self.train.optimizer] + (self.train.optimizer == "sgd" and self.train.momentum > 0)
        static = held = (1 + states) * own.weights + own.casts
        if c.microbatches // form.replicas >= (1 if form.joint else 2):  # else a device may end with its first one
            held = held + own.weights
            if form.replicas * c.replicas > 1:
                alone = [c.replicas * len(set(column)) == 1 for column in place.T]
                held = held + np.where(alone, 0.0, own.summed)
        room = capacity - self.profile.base_bytes
        if _by_device(place, held).max() * (1 - 1e-9) > room:
            return []
        plain = c.recompute == "none" and c.memory_limit is None and not form.recomputes
        if not (SCHEDULES[c.schedule].fills and plain):
            return None
        local = [0.0, *(own.leaving[s - 1] * (place[0, s] == place[0, s - 1]) for s in range(1, form.stages))]
        each = own.kept - local if form.joint else np.minimum(own.kept - local, own.waiting)
        alive = (c.microbatches if c.unit is None else min(c.unit, c.microbatches)) * _by_device(place, each)
        left = room - _by_device(place, static)
        if (alive * (1 - 1e-9) <= left).all():
            return None
        reliefs: list[tuple[float, Candidate]] = []
        if self.train.clip is not None and c.update == "auto":
            waiting = c._replace(update="wait")
            reliefs.append((self.least(waiting), waiting))
        if not self.recompute:
            return reliefs
        one = _by_device(place, own.kept)
        most = np.clip((left + one) / np.maximum(alive, 1.0), 0.0, 1.0)
        reliefs.append(self._keeping_microbatches(c, most.tolist()))
        if self.partly and not c.sub_pipelined:
            reliefs.append(self._keeping_layers(c, np.clip(left / np.maximum(alive, 1.0), 0.0, 1.0).tolist()))
        return reliefs

    def _held(self, stages: int, microbatch: int) -> _Held:
        key = (stages, microbatch)
        if key not in self._stage_bytes:
            p, width = self.profile, gradient_width(self.profile.dtype)
            cut = self.cut(stages, microbatch)
            rows = [[p.layers[i] for i in layers] for layers in cut]
            weights = np.array([parameters(p, layers) for layers in cut], float) * width
            ends = np.array([bool({0, len(p.layers) - 1} & set(layers)) for layers in cut])
            leaving = np.array([row[-1].output_bytes * microbatch for row in rows])
            self._stage_bytes[key] = _Held(
                weights=weights, casts=np.array([sum(x.cast_bytes for x in row) for row in rows]),
                summed=weights - ends * p.tied_parameters * width, leaving=leaving,
                kept=np.array([sum(x.kept_bytes for x in row) * microbatch for row in rows]) + leaving,
                waiting=np.array([sum(x.waiting for x in row) * microbatch for row in rows]),
            )  # fmt: skip
        return self._stage_bytes[key]

    # Exact figures

    def predict(self, c: Candidate, timed: bool = False) -> Prediction:
        """Memory, and the step's time if it fits (or ``timed`` asks for it); else its bound.

        Raises:
            ScheduleError: the family has no such shape.
        """
        keep = self._keep(c) if c.recompute == "stage-aware" else None
        again = self._again(c) if c.recompute == "layers" else None
        found = Prediction(
            candidate=c, batch=self.train.batch, cut=self.cut(c.form.stages, c.microbatch),
            costs=self.costs(c) if again is None else self._stage_costs(c, c.form, again),
            step_s=self.least(c), compute_s=0.0, busy_s=0.0, memory=self._memory(c, keep, again),
            capacity=self.profile.memory_bytes, keep=keep, again=again,
        )  # fmt: skip
        return self.time(found) if found.fits or timed else found

    def predict_order(self, c: Candidate, schedule: Schedule) -> Prediction:
        """Judge an order that was searched: compute tasks of one data-parallel copy."""
        form = Form.of(schedule, "auto")
        order = Order(schedule)
        found = Prediction(
            candidate=c, batch=self.train.batch, cut=self.cut(form.stages, c.microbatch), costs=self.costs(c, form),
            step_s=0.0, compute_s=0.0, busy_s=0.0, memory=self._order_memory(c, order),
            capacity=self.profile.memory_bytes, order=schedule,
        )  # fmt: skip
        return self.time(found, final=True)

    def time(self, p: Prediction, final: bool = False) -> Prediction:
        """The prediction with its step's time, gradient sums placed where it is shortest.

        No placement ends a step sooner than eager sums do, so a search needs no other. ``final``: the simplest that is
        as good and whose buffers fit, and the parts of the step.
        """
        c, costs, around = p.candidate, p.costs, self.around(p.candidate)
        shared = p.form.replicas * c.replicas > 1

        def timed(sync: Sync) -> StepTime:
            if p.order is not None:
                return step_time(Order(p.order), costs, sync, around, parts=final)

            def figures(count: int, unit: int | None) -> Figures:
                order = self._orders.of(c._replace(unit=unit), count, p.keep, p.remade)
                return np.array(step_time(order, costs, sync, around, parts=final))

            return StepTime(*map(float, self._at_scale(c, figures, FINAL if final else None)))

        sync = self.syncs[-1] if shared else self.syncs[0]
        best = timed(sync)
        if final and shared:
            for simpler in self.syncs[:-1]:
                found = timed(simpler)
                if found.step <= best.step * (1 + 1e-6):
                    sync, best = simpler, found
                    break
        timed_p = replace(
            p, candidate=c._replace(sync=sync), step_s=best.step, compute_s=best.compute, busy_s=best.busy
        )
        small = 3 * p.form.stages * c.microbatches <= DIRECT
        if final and shared and sync != "lazy" and p.fits and (small or p.order is not None):
            order = Order(p.order) if p.order is not None else self._orders.of(c, c.microbatches, p.keep, p.remade)
            if order.tasks <= DIRECT:  # sums under way beside activations
                held = replace(timed_p, memory=self._order_memory(c, order.whole(sync), p.again))
                if not held.fits and "lazy" in self.syncs:
                    lazy = timed("lazy")
                    return replace(p, step_s=lazy.step, compute_s=lazy.compute, busy_s=lazy.busy)
                return held
        return timed_p

    def _at_scale(
        self, c: Candidate, measure: Callable[[int, int | None], Figures], whole: int | None = None,
        known: Callable[[Figures], bool] = lambda figures: False,
    ) -> Figures:  # fmt: skip
        """Figures of the candidate's step, ``measure(micro-batches, unit)``; ``known`` as for ``at_scale``."""
        count, unit, each = c.microbatches, c.unit, 3 * c.form.stages
        if each * count <= (DIRECT if whole is None else whole):
            return measure(count, unit)
        most, turn = LONGEST // each, 2 * c.stages
        if unit is None or unit == count:
            return at_scale(lambda n: measure(n, None if unit is None else n), count, turn, most, known)
        if count <= most or 5 * unit <= most or count % unit:
            return at_scale(lambda n: measure(n, unit), count, unit, most, known)

        def shorter(size: int) -> Figures:  # as many units, of so many micro-batches each
            return at_scale(lambda n: measure(n, size), count // unit * size, size, most, known)

        return at_scale(shorter, unit, turn, max(1, most // min(count // unit, 5)), known)

    def _order_memory(
        self, c: Candidate, order: Order, again: frozenset[int] | None = None
    ) -> tuple[DeviceMemory, ...]:  # fmt: skip
        ahead = self.train.clip is not None and not self.around(c).waits(order)
        return device_memory(
            self.profile, self.cut(order.schedule.stages, c.microbatch), order.schedule, c.microbatch,
            copies=c.replicas, optimizer=self.train.optimizer, momentum=self.train.momentum > 0, ahead=ahead,
            again=again,
        )  # fmt: skip

    def _memory(
        self, c: Candidate, keep: Keep | None, again: frozenset[int] | None = None
    ) -> tuple[DeviceMemory, ...]:  # fmt: skip
        remade = None if again is None else stages_of(self.cut(c.form.stages, c.microbatch), again)

        def measure(count: int, unit: int | None) -> Figures:
            devices = self._order_memory(c, self._orders.of(c._replace(unit=unit), count, keep, remade), again)
            return np.array([value for device in devices for value in device.terms().values()])

        def too_large(found: Figures) -> bool:
            return bool((found.reshape(c.stages, -1).sum(axis=1) > self.profile.memory_bytes).any())

        rows = self._at_scale(c, measure, known=too_large).reshape(c.stages, -1)
        return tuple(DeviceMemory(**dict(zip(TERMS, map(float, row), strict=True))) for row in rows)

    def _keep(self, c: Candidate) -> Keep:
        """Per stage, the largest share of micro-batches that memory holds without recomputation.

        Devices fill up independently of one another, so one bisection serves all of them.

        Source: Lai et al. 2022 (Merak), section 3.4, whose formula is this for even stages and 1F1B.
        """
        form = c.form
        nothing = (0.0,) * form.stages
        if not self.partly or not self.holds(c):
            return nothing
        low, high = [0] * c.stages, [LEVELS + 1] * c.stages  # holds, holds not
        while any(h - k > 1 for k, h in zip(low, high, strict=True)):
            level = [(k + h) // 2 for k, h in zip(low, high, strict=True)]
            shares = tuple(min(level[row[s]] for row in form.placement) / LEVELS for s in range(form.stages))
            for d, row in enumerate(self._memory(c, shares)):
                if row.total <= self.profile.memory_bytes:
                    low[d] = level[d]
                else:
                    high[d] = level[d]
        return tuple(min(low[row[s]] for row in form.placement) / LEVELS for s in range(form.stages))

    def _again(self, c: Candidate) -> frozenset[int]:
        """Layers that are recomputed if each stage keeps as many of its first ones as its device's memory holds.

        Levels are shares of a stage's layers, the same for all stages of a device; devices fill up independently.
        """
        form, cut = c.form, self.cut(c.form.stages, c.microbatch)
        levels = max(map(len, cut))
        everything = again_after(cut, (0.0,) * form.stages)
        if max(row.total for row in self._memory(c, None, everything)) > self.profile.memory_bytes:
            return everything
        low, high = [0] * c.stages, [levels + 1] * c.stages  # holds, holds not
        while any(h - k > 1 for k, h in zip(low, high, strict=True)):
            level = [(k + h) // 2 for k, h in zip(low, high, strict=True)]
            for d, row in enumerate(self._memory(c, None, again_after(cut, _shares(form, level, levels)))):
                if row.total <= self.profile.memory_bytes:
                    low[d] = level[d]
                else:
                    high[d] = level[d]
        return again_after(cut, _shares(form, low, levels))

    def relief(self, p: Prediction) -> list[tuple[float, Candidate]]:
        """See ``Judge``: fewer activations where the family can be told, else recomputation."""
        c = p.candidate
        if p.fits or c.recompute != "none" or c.form.versions != "flush":
            return []
        found: list[tuple[float, Candidate]] = []
        if c.update == "auto" and any(
            memory.undo for memory in p.memory
        ):  # running ahead may be worth more than activations are
            waiting = c._replace(update="wait")
            found.append((self.least(waiting), waiting))
        told = "memory_limit" in SCHEDULES[c.schedule].options and "unit" not in SCHEDULES[c.schedule].options
        if told and c.memory_limit is None:
            for limit in self._limits(p):
                limited = c._replace(memory_limit=float(limit))
                found.append((self.least(limited), limited))
        if self.recompute and not c.form.recomputes and (c.memory_limit is None or self.partly):
            found.append(self._recomputing(p))
            if self.partly and not c.sub_pipelined:  # halves are recomputed whole
                found.append(self._recomputing_layers(p))
        return found

    def _limits(self, p: Prediction) -> list[int]:
        """Numbers of activations for a family that can be told: as many as there is room for, and some between that and
        what it holds untold, which fit only with recomputation of part of them."""
        room, size = self.room(p), float(p.form.size)
        if not self.partly:
            return [room] * (room >= 1)
        held = max(m.activations / (one * size) for m, one in zip(p.memory, self._largest(p), strict=True))
        between = range(room + 1, ceil(held))
        return [room] * (room >= 1) + list(between[:: max(1, ceil(len(between) / LIMITS))])

    def _recomputing(self, p: Prediction) -> tuple[float, Candidate]:
        """Recomputation where memory is short, and its bound: so much at least cannot be kept.

        Keeping a share a of the k micro-batches in flight keeps at least k*a - 1 of them alive together.
        """
        c = p.candidate
        most = [1.0] * c.stages
        for d, (memory, one) in enumerate(zip(p.memory, self._largest(p), strict=True)):
            if memory.activations > 0:
                room = memory.activations - (memory.total - p.capacity) + one
                most[d] = min(1.0, max(0.0, room / memory.activations))
        return self._keeping_microbatches(c, most)

    def _keeping_microbatches(self, c: Candidate, most: Sequence[float]) -> tuple[float, Candidate]:
        """Recomputation where each device keeps at most such a share of its micro-batches, and its bound."""
        form = c.form
        share = [min(most[row[s]] for row in form.placement) for s in range(form.stages)]
        costs = self.costs(c)
        again = tuple((1 - a) * t for a, t in zip(share, costs.recompute, strict=True))
        bound = least_step_seconds(
            form, c.microbatches, replace(costs, recompute=again), self.around(c), frozenset(range(form.stages))
        )  # fmt: skip
        return bound * (1 - 1e-9), c._replace(recompute="stage-aware")

    def _recomputing_layers(self, p: Prediction) -> tuple[float, Candidate]:
        """The same by layers. All micro-batches in flight keep the same layers, so where activations are to shrink to a
        share, the layers that one of the device's stages keeps are no more than that share of what it keeps now."""
        shares = []
        for memory in p.memory:
            room = memory.activations - (memory.total - p.capacity)
            shares.append(min(1.0, max(0.0, room / memory.activations)) if memory.activations else 1.0)
        return self._keeping_layers(p.candidate, shares)

    def _keeping_layers(self, c: Candidate, shares: Sequence[float]) -> tuple[float, Candidate]:
        """Recomputation where some stage of each device keeps at most such a share of its layers, and its bound."""
        form, costs, cut = c.form, self.costs(c), self.cut(c.form.stages, c.microbatch)
        levels = max(map(len, cut))
        samples = c.microbatch * float(form.size)
        most = [0] * c.stages
        for s, layers in enumerate(cut):
            own = [self.profile.layers[i] for i in layers]
            kept = [layer.kept_bytes * samples + layer.kept_fixed_bytes for layer in own]
            whole = sum(kept) + own[-1].output_bytes * samples
            for d in {row[s] for row in form.placement}:
                fits = [
                    level for level in range(levels + 1)
                    if sum(kept[: floor(level / levels * len(kept) + 1e-9)]) <= shares[d] * whole * (1 + 1e-9)
                ]  # fmt: skip
                most[d] = max(most[d], max(fits, default=0))
        again = again_after(cut, _shares(form, most, levels))
        remade = stages_of(cut, again)
        if remade:
            costs = self._stage_costs(c, form, again)
        bound = least_step_seconds(form, c.microbatches, costs, self.around(c), remade)
        return bound * (1 - 1e-9), c._replace(recompute="layers")

    def _largest(self, p: Prediction) -> list[float]:
        """Per device, the most bytes of activations that a micro-batch has on a stage of it."""
        most = [0.0] * p.candidate.stages
        for s, layers in enumerate(p.cut):
            own = [self.profile.layers[i] for i in layers]
            each = sum(x.kept_bytes for x in own) + own[-1].output_bytes
            kept = each * p.candidate.microbatch + sum(x.kept_fixed_bytes for x in own)
            for row in p.form.placement:
                most[row[s]] = max(most[row[s]], kept)
        return most

    def schedule_of(self, p: Prediction) -> Schedule:
        """Compute tasks of one data-parallel copy."""
        if p.order is not None:
            return p.order
        return self._orders.of(p.candidate, p.candidate.microbatches, p.keep, p.remade).schedule

    def holds(self, c: Candidate) -> bool:
        """Whether the candidate fits; False for one that does not exist."""
        try:
            keep = (0.0,) * c.form.stages if c.recompute == "stage-aware" else None
            return max(device.total for device in self._memory(c, keep)) <= self.profile.memory_bytes
        except ScheduleError:
            return False

    def room(self, p: Prediction) -> int:
        """Activations of a stage that every device could hold beside everything else it holds."""
        size = float(p.form.size)
        most = [
            (p.capacity - memory.total + memory.activations) / (one * size)
            for memory, one in zip(p.memory, self._largest(p), strict=True)
        ]
        return max(0, floor(min(most)))


def _shares(form: Form, level: Sequence[int], levels: int) -> Keep:
    """Per stage, the share of its layers that are kept at these levels of the devices that hold it."""
    return tuple(min(level[row[s]] for row in form.placement) / levels for s in range(form.stages))


def _by_device(place: NDArray[np.int64], each: Figures) -> Figures:
    """Sums over the stages that a device holds, of whatever replica."""
    total: Figures = np.bincount(place.ravel(), np.broadcast_to(each, place.shape).ravel()).astype(float)
    return total
