"""What may be done about a plan that memory does not hold: fewer activations, or some of them computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, floor
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from raypipe.cost.memory import STATES
from raypipe.cost.profile import Profile
from raypipe.cost.stages import gradient_width, parameters
from raypipe.job.recompute_layers import recomputed_after
from raypipe.job.train_spec import TrainSpec
from raypipe.plan.candidate import Candidate
from raypipe.plan.cut.bottleneck import Cut
from raypipe.plan.predict.at_scale import Figures
from raypipe.plan.predict.form import Form
from raypipe.plan.predict.orders import Keep
from raypipe.plan.predict.prediction import Prediction, stages_of
from raypipe.plan.predict.step_bound import least_step_seconds
from raypipe.plan.predict.step_time import StepOverheads
from raypipe.schedule import SCHEDULES
from raypipe.schedule.costs import CostTable

LIMITS = 4
"""Memory limits that are tried with recomputation."""


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


class Costs(Protocol):
    """What the fallbacks ask of the predictor."""

    profile: Profile
    train: TrainSpec
    recompute: bool
    partly: bool

    def cut(self, stages: int, microbatch: int) -> Cut:
        """The layers of each stage."""

    def costs(self, c: Candidate) -> CostTable:
        """Seconds of each stage's tasks, for a full micro-batch."""

    def costs_with_recompute(self, c: Candidate, form: Form, recomputed: frozenset[int] | None = None) -> CostTable:
        """The same where an R computes these layers again."""

    def overheads(self, c: Candidate) -> StepOverheads:
        """What a step has besides its tasks."""

    def least(self, c: Candidate) -> float:
        """A lower bound on its step, in seconds."""


@dataclass(slots=True)
class OOMFallback:
    """Other candidates for one that is too large, each with a time that it takes at least."""

    judge: Costs
    _stage_bytes: dict[tuple[int, int], _Held] = field(default_factory=dict)

    def outright(self, c: Candidate) -> list[tuple[float, Candidate]] | None:
        """See ``Judge``: what a device holds once its gradients are there and while they are summed, whatever is done
        about activations; and with all activations of a unit, where the family runs its forwards first."""
        form, train, capacity = c.form, self.judge.train, self.judge.profile.memory_bytes
        place = np.array(form.placement)
        own = self._held(form.stages, c.microbatch)
        states = STATES[train.optimizer] + (train.optimizer == "sgd" and train.momentum > 0)
        static = held = (1 + states) * own.weights + own.casts
        if c.microbatches // form.replicas >= (1 if form.joint else 2):  # else a device may end with its first one
            held = held + own.weights
            if form.replicas * c.replicas > 1:
                alone = [c.replicas * len(set(column)) == 1 for column in place.T]
                held = held + np.where(alone, 0.0, own.summed)
        room = capacity - self.judge.profile.base_bytes
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
        oom_fallbacks: list[tuple[float, Candidate]] = []
        if self.judge.train.clip is not None and c.update == "auto":
            waiting = c._replace(update="wait")
            oom_fallbacks.append((self.judge.least(waiting), waiting))
        if not self.judge.recompute:
            return oom_fallbacks
        one = _by_device(place, own.kept)
        most = np.clip((left + one) / np.maximum(alive, 1.0), 0.0, 1.0)
        oom_fallbacks.append(self._keeping_microbatches(c, most.tolist()))
        if self.judge.partly and not c.sub_pipelined:
            oom_fallbacks.append(self._keeping_layers(c, np.clip(left / np.maximum(alive, 1.0), 0.0, 1.0).tolist()))
        return oom_fallbacks

    def _held(self, stages: int, microbatch: int) -> _Held:
        key = (stages, microbatch)
        if key not in self._stage_bytes:
            p, width = self.judge.profile, gradient_width(self.judge.profile.dtype)
            cut = self.judge.cut(stages, microbatch)
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

    def of(self, p: Prediction) -> list[tuple[float, Candidate]]:
        """See ``Judge``: fewer activations where the family can be told, else recomputation."""
        c = p.candidate
        if p.fits or c.recompute != "none" or c.form.versions != "flush":
            return []
        found: list[tuple[float, Candidate]] = []
        # Running ahead may be worth more than activations are, or less: both ways are tried.
        if c.update == "auto" and any(memory.undo for memory in p.memory):
            waiting = c._replace(update="wait")
            found.append((self.judge.least(waiting), waiting))
        told = "memory_limit" in SCHEDULES[c.schedule].options and "unit" not in SCHEDULES[c.schedule].options
        if told and c.memory_limit is None:
            for limit in self._limits(p):
                limited = c._replace(memory_limit=float(limit))
                found.append((self.judge.least(limited), limited))
        if self.judge.recompute and not c.form.recomputes and (c.memory_limit is None or self.judge.partly):
            found.append(self._recomputing(p))
            if self.judge.partly and not c.sub_pipelined:  # halves are recomputed whole
                found.append(self._recomputing_layers(p))
        return found

    def _limits(self, p: Prediction) -> list[int]:
        """Numbers of activations for a family that can be told: as many as there is room for, and some between that and
        what it holds untold, which fit only with recomputation of part of them."""
        room, size = self.room(p), float(p.form.size)
        if not self.judge.partly:
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
        costs = self.judge.costs(c)
        recomputed = tuple((1 - a) * t for a, t in zip(share, costs.recompute, strict=True))
        bound = least_step_seconds(
            form, c.microbatches, replace(costs, recompute=recomputed), self.judge.overheads(c),
            frozenset(range(form.stages)),
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
        form, costs, cut = c.form, self.judge.costs(c), self.judge.cut(c.form.stages, c.microbatch)
        levels = max(map(len, cut))
        samples = c.microbatch * float(form.size)
        most = [0] * c.stages
        for s, layers in enumerate(cut):
            own = [self.judge.profile.layers[i] for i in layers]
            kept = [layer.kept_bytes * samples + layer.kept_fixed_bytes for layer in own]
            whole = sum(kept) + own[-1].output_bytes * samples
            for d in {row[s] for row in form.placement}:
                fits = [
                    level for level in range(levels + 1)
                    if sum(kept[: floor(level / levels * len(kept) + 1e-9)]) <= shares[d] * whole * (1 + 1e-9)
                ]  # fmt: skip
                most[d] = max(most[d], max(fits, default=0))
        recomputed = recomputed_after(cut, shares_kept(form, most, levels))
        remade = stages_of(cut, recomputed)
        if remade:
            costs = self.judge.costs_with_recompute(c, form, recomputed)
        bound = least_step_seconds(form, c.microbatches, costs, self.judge.overheads(c), remade)
        return bound * (1 - 1e-9), c._replace(recompute="layers")

    def _largest(self, p: Prediction) -> list[float]:
        """Per device, the most bytes of activations that a micro-batch has on a stage of it."""
        most = [0.0] * p.candidate.stages
        for s, layers in enumerate(p.cut):
            own = [self.judge.profile.layers[i] for i in layers]
            each = sum(x.kept_bytes for x in own) + own[-1].output_bytes
            kept = each * p.candidate.microbatch + sum(x.kept_fixed_bytes for x in own)
            for row in p.form.placement:
                most[row[s]] = max(most[row[s]], kept)
        return most

    def room(self, p: Prediction) -> int:
        """Activations of a stage that every device could hold beside everything else it holds."""
        size = float(p.form.size)
        most = [
            (p.capacity - memory.total + memory.activations) / (one * size)
            for memory, one in zip(p.memory, self._largest(p), strict=True)
        ]
        return max(0, floor(min(most)))


def shares_kept(form: Form, level: Sequence[int], levels: int) -> Keep:
    """Per stage, the share of its layers that are kept at these levels of the devices that hold it."""
    return tuple(min(level[row[s]] for row in form.placement) / levels for s in range(form.stages))


def _by_device(place: NDArray[np.int64], each: Figures) -> Figures:
    """Sums over the stages that a device holds, of whatever replica."""
    total: Figures = np.bincount(place.ravel(), np.broadcast_to(each, place.shape).ravel()).astype(float)
    return total
