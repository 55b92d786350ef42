"""Fallbacks for a plan that runs out of memory: state divided among its data-parallel copies, fewer activations in
flight, or some of them recomputed.

The least memory of a plan that divides its state follows from that of the same order undivided. Gathers and
reduce-scatters come into an order without changing the order of its tasks, so at the moment when the undivided plan is
fullest, as many activations are alive. One order so serves every ZeRO level, size of the shard groups and way of
gathering, of which most are too large where memory is short; none of these has to be made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, floor

import numpy as np
from numpy.typing import NDArray

from raypipe.cost.kinds import capacities, room_bytes
from raypipe.cost.memory import DeviceMemory, kept_bytes, parameter_bytes, shares_input, stage_memory
from raypipe.job.requested_schedule import recomputed_after
from raypipe.plan.candidate import Candidate, in_slices
from raypipe.plan.predict.at_scale import Figures
from raypipe.plan.predict.bounds import Bounds, by_device, unanswered, waiting
from raypipe.plan.predict.form import Form
from raypipe.plan.predict.orders import Keep
from raypipe.plan.predict.prediction import Prediction, stages_of
from raypipe.plan.shard_ways import shard_ways
from raypipe.schedule import SCHEDULES


def least_divided(
    whole: Sequence[DeviceMemory],
    placement: Sequence[Sequence[int]] | NDArray[np.int64],
    level: int,
    stage: Mapping[str, NDArray[np.float64]],
) -> tuple[DeviceMemory, ...]:
    """Return, per device, terms of memory that are no larger than those at some moment of the divided plan.

    Args:
        whole: of the same order without shards, whose updates wait for the norm, as they do with them.
        placement: device of each stage, per replica.
        level: ZeRO level, 1 to 3.
        stage: bytes by stage of one holder's share: fields of ``StageMemory``.
    """
    state = stage["weights"] + stage["frozen"] + stage["optimizer"]
    held = np.zeros(len(whole))
    np.add.at(held, np.array(placement), np.broadcast_to(state, np.shape(placement)))
    return tuple(_least(one, float(own), level) for one, own in zip(whole, held, strict=True))


def _least(whole: DeviceMemory, state: float, level: int) -> DeviceMemory:
    """``state`` is the device's share of weights and optimizer state, of all replicas."""
    running = whole.activations > 0  # else it may be fullest in its update, which is divided
    return replace(
        DeviceMemory(),
        base=whole.base,
        weights=state,
        inputs=whole.inputs,
        activations=whole.activations,
        casts=whole.casts if running and level < 3 else 0.0,  # at level 3 they go with the gathered weights
        # From level 2 on only a reduce-scatter's sums may be there.
        gradients=whole.gradients if running and level == 1 else 0.0,
        workspace=whole.workspace if running else 0.0,
        messages=whole.messages if running else 0.0,
    )


LIMITS = 4
"""Memory limits that are tried with recomputation."""
LARGE_LAYER = 0.05
"""Share of a device's memory that activations of one sample take in most layers, where these are large."""


@dataclass
class OOMFallback(Bounds, ABC):
    """Other candidates for one that is too large, each with a time that it takes at least."""

    @abstractmethod
    def undivided(self, c: Candidate) -> tuple[DeviceMemory, ...] | None:
        """Return the memory of the same order if copies divide nothing; None where that takes long to find."""

    def shard_ways(self, c: Candidate, highest: int = 3) -> Iterator[Candidate]:
        """Return what the candidate's copies may divide, up to a ZeRO level; nothing where they may not."""
        if self.divides:
            yield from shard_ways(c, self.profile.placed, self.most_stages, self.asked, highest, self._has_large_layers)

    @cached_property
    def _has_large_layers(self) -> bool:
        """Small layers leave as much memory in stages of several, and more stages take longer to try."""
        most = max(kind.memory_bytes for kind in self.profile.kinds)
        return float(np.median(self._arrays.kept(1, True))) > LARGE_LAYER * most

    @property
    def partly(self) -> bool:
        """Return whether plans that recompute may keep some activations."""
        return "full" not in self.recompute

    def outright(self, c: Candidate) -> list[tuple[float, Candidate]] | None:
        """If lower bounds on memory already prove that the candidate does not fit: its fallbacks, with lower bounds on
        their steps; else None.

        Two moments need no order to be bounded: when a device has all its gradients, and, where it is known how many
        forwards come before a backward, when these have run. What copies divide needs no order of its own.
        """
        form, profile = c.form, self.profile
        place, stage = np.array(form.placement), self._terms_of(c)
        divided = self._sharing(c)
        static = held = stage["weights"] + stage["frozen"] + stage["optimizer"]
        if c.level < 3:  # else 16-bit copies go with the gathered weights
            static = held = held + stage["casts"]
        if c.microbatches // form.replicas >= (1 if form.joint else 2):  # else a device may end with its first one
            held = held + stage["gradients"]
            if form.versions != "flush" and form.replicas * c.replicas > 1:
                alone = [c.replicas * len(set(column)) == 1 for column in place.T]
                held = held + np.where(alone, 0.0, stage["reduced"])
        room = np.array(room_bytes(profile, c.stages, c.replicas))
        if (by_device(place, held) * (1 - 1e-9) > room).any():
            return divided + self._within_memory(c)
        plain = c.recompute == "none" and c.memory_limit is None and not form.recomputes
        others = waiting(c, form)
        if not (any(others) and plain) or (SCHEDULES[c.schedule].in_turn and _takes_limits(c)):
            return self._divided_outright(c, place, stage)
        own = stage["kept"] - np.where(shares_input(form.placement), stage["input"], 0.0)
        each = own if form.joint else np.minimum(own, stage["kept_for_w"])
        frozen = list(self.frozen(self.cut(c)))  # whose activations may end before any weight gradient
        each[frozen] = 0.0
        alive = by_device(place, (np.array(others) + 1) * each)
        left = room - by_device(place, static + np.array(unanswered(c, form)) * stage["sent"])
        if (alive * (1 - 1e-9) <= left).all():
            return self._divided_outright(c, place, stage)
        oom_fallbacks = divided
        if self.train.needs_norm and c.update == "auto":
            late = replace(c, update="wait")
            oom_fallbacks.append((self.least_of_all(late), late))
        most = np.clip((left + by_device(place, stage["kept"])) / np.maximum(alive, 1.0), 0.0, 1.0)
        layers = np.clip(left / np.maximum(alive, 1.0), 0.0, 1.0)
        return oom_fallbacks + self._recomputing(c, most.tolist(), layers.tolist()) + self._slicing(c)

    def unordered(self, c: Candidate) -> list[tuple[float, Candidate]] | None:
        """Return the fallbacks of a candidate that is too slow if it keeps all activations, with bounds that need no
        order; None where they depend on what an order holds."""
        if c.recompute != "none" or c.form.versions != "flush":
            return [] if self.is_too_large(c) else None
        if self.is_too_large(c):
            return self._sharing(c) + self._within_memory(c)
        if not self.memory_binds(c):
            return []
        if _takes_limits(c):
            return None
        result = self._sharing(c) + self._within_memory(c)
        if self.train.needs_norm and c.update == "auto":
            waiting = replace(c, update="wait")
            result.append((self.least_of_all(waiting), waiting))
        if not c.form.recomputes and (c.memory_limit is None or self.partly):
            ways = ("full",) if c.slices > 1 and self.recompute else self.recompute
            others = [replace(c, recompute=way) for way in ways if way != "layers" or not c.sub_pipelined]
            result += [(self.least(other), other) for other in others]
        return result + self._slicing(c)

    def _divided_outright(
        self, c: Candidate, place: NDArray[np.int64], stage: dict[str, Figures]
    ) -> list[tuple[float, Candidate]] | None:
        """The same for a candidate whose copies divide state, from what its order takes where they do not."""
        if c.shard == "none" or (c.recompute == "none" and _takes_limits(c)):  # limits follow from the very memory
            return None
        whole = self.undivided(c)
        if whole is None:
            return None
        memory = least_divided(whole, place, c.level, stage)
        most = capacities(self.profile, c.stages, c.replicas)
        if all(one.total * (1 - 1e-9) <= room for one, room in zip(memory, most, strict=True)):
            return None
        unfit = self.prediction(c, self.cut(c), self.costs(c), memory, step_s=self.least(c))
        return self.oom_fallback(unfit)

    def _sharing(self, c: Candidate) -> list[tuple[float, Candidate]]:
        """The candidate with more of its state divided: per size of the shard groups, the next ZeRO level whose shares
        alone are not too large. From a model on one device, also the ways that cut it into stages."""
        if c.recompute != "none" or c.memory_limit is not None or c.balance == "memory":
            return []
        result: list[tuple[float, Candidate]] = []
        for (_, schedule), ways in self._ways(c).items():
            least = 4
            for way in ways:
                higher = c.level < way.level <= least and (schedule == c.schedule or c.shard == "none")
                if higher and not self.is_too_large(way):
                    least = way.level
                    result.append((self.least_of_all(way), way))
        return result

    def _ways(self, c: Candidate) -> dict[tuple[int | None, str], list[Candidate]]:
        """Ways to divide the candidate's state, by shard group and schedule, by rising level."""
        plain = replace(c, shard="none", gather="unit", shard_replicas=None)
        result: dict[tuple[int | None, str], list[Candidate]] = {}
        for way in self.shard_ways(plain):
            if c.shard == "none" or way.shard_replicas == c.shard_replicas:
                result.setdefault((way.shard_replicas, way.schedule), []).append(way)
        return result

    def _terms_of(self, c: Candidate) -> dict[str, Figures]:
        return self.stage_bytes(c, c.form, c.level, c.shard_group)

    def oom_fallback(self, p: Prediction) -> list[tuple[float, Candidate]]:
        """Return slower variants that need less memory, with lower bounds, for a candidate that does not fit: fewer
        activations in flight where the family takes a limit, and recomputation."""
        c = p.candidate
        if not p.fits and c.slices > 1 and c.recompute == "full":
            return self._slicing(c)
        if p.fits or c.recompute != "none" or c.form.versions != "flush":
            return []
        result = self._sharing(c)
        if c.level == 1 and any(way.level == 2 for _, way in result):
            return result  # what level 2 takes no longer for is not recomputed
        result += self._within_memory(c)
        # Running ahead may be worth more than activations are, or less: both ways are tried.
        if c.update == "auto" and any(memory.undo for memory in p.memory):
            waiting = replace(c, update="wait")
            result.append((self.least_of_all(waiting), waiting))
        if _takes_limits(c):
            for limit in self._limits(p):
                limited = replace(c, memory_limit=float(limit))
                result.append((self.least(limited), limited))
        if not c.form.recomputes and (c.memory_limit is None or self.partly):
            result += self._recomputing_for(p)
        return result + self._slicing(c)

    def _slicing(self, c: Candidate) -> list[tuple[float, Candidate]]:
        """The candidate with more slices along the sequence, which keeps its activations or recomputes all of them."""
        more = next(in_slices(c, self.slices), None)
        return [] if more is None else [(self.least_of_all(more), more)]

    def _within_memory(self, c: Candidate) -> list[tuple[float, Candidate]]:
        """The candidate with a cut that leaves devices with little memory fewer layers, where devices differ."""
        if not self.profile.other_kinds or c.balance != "stages" or not c.one_stage_each:
            return []
        within = replace(c, balance="memory")
        return [(self.least(within), within)]

    def _limits(self, p: Prediction) -> list[int]:
        """Limits for a family that takes one: as many activations as there is room for, and some between that and what
        it holds without a limit, which fit only with recomputation of part of them."""
        room, size = self.room(p), float(p.form.size)
        if not self.partly:
            return [room] * (room >= 1)
        held = max(m.in_flight / (one * size) for m, one in zip(p.memory, self._largest(p), strict=True))
        between = range(room + 1, ceil(held))
        return [room] * (room >= 1) + list(between[:: max(1, ceil(len(between) / LIMITS))])

    def _recomputing_for(self, p: Prediction) -> list[tuple[float, Candidate]]:
        """The candidate with each way of recomputing that may be taken, where memory is short.

        Keeping a share a of the k micro-batches in flight keeps at least k*a - 1 of them alive together. All of them
        keep the same layers, so where activations are to shrink to a share, the layers that one of the device's stages
        keeps are no more than that share of what it keeps now. What CUDA graphs of a micro-batch have beside its
        activations need not shrink.
        """
        microbatches, layers = [1.0] * p.candidate.stages, [1.0] * p.candidate.stages
        kept = float(min(self._terms_of(p.candidate)["kept"] / self._held_of_each(p)))
        for d, (memory, one) in enumerate(zip(p.memory, self._largest(p), strict=True)):
            if memory.in_flight > 0:
                room = memory.in_flight - (memory.total - p.capacities[d])
                microbatches[d] = min(1.0, max(0.0, (room + one) / memory.in_flight))
                layers[d] = min(1.0, max(0.0, room / (kept * memory.in_flight)))
        return self._recomputing(p.candidate, microbatches, layers)

    def _recomputing(
        self, c: Candidate, microbatches: Sequence[float], layers: Sequence[float]
    ) -> list[tuple[float, Candidate]]:
        """The candidate with each way of recomputing that may be taken, with a lower bound on its step.

        Args:
            c: the candidate.
            microbatches: per device, the largest share of its micro-batches that can be kept.
            layers: per device, the largest share of its layers.
        """
        result = []
        if c.slices > 1:  # a stage in slices recomputes everything or nothing
            bound = self.least_step(c, self.costs(c), frozenset(range(c.form.stages)))
            return [(bound * (1 - 1e-9), replace(c, recompute="full"))] if self.recompute else []
        for way in self.recompute:
            if way != "layers":
                result.append((self._keeping_microbatches(c, microbatches), replace(c, recompute=way)))
            elif not c.sub_pipelined:  # halves are recomputed whole
                result.append((self._keeping_layers(c, layers), replace(c, recompute=way)))
        return result

    def _keeping_microbatches(self, c: Candidate, most: Sequence[float]) -> float:
        """A lower bound on the step if each device keeps at most such a share of its micro-batches."""
        form = c.form
        share = [min(most[row[s]] for row in form.placement) for s in range(form.stages)]
        costs = self.costs(c)
        recomputed = tuple((1 - a) * t for a, t in zip(share, costs.recompute, strict=True))
        bound = self.least_step(c, replace(costs, recompute=recomputed), frozenset(range(form.stages)))
        return bound * (1 - 1e-9)

    def _keeping_layers(self, c: Candidate, shares: Sequence[float]) -> float:
        """A lower bound on the step if some stage of each device keeps at most such a share of its layers."""
        form, costs, cut = c.form, self.costs(c), self.cut(c)
        levels = max(map(len, cut))
        samples = c.microbatch * float(form.size)
        most = [0] * c.stages
        for s, layers in enumerate(cut):
            own = [self.profile.layers[i] for i in layers]
            kept = [kept_bytes(layer, samples, split=not form.joint) for layer in own]
            whole = sum(kept) + own[-1].output_bytes * samples
            for d in {row[s] for row in form.placement}:
                fits = [
                    level
                    for level in range(levels + 1)
                    if sum(kept[: floor(level / levels * len(kept) + 1e-9)]) <= shares[d] * whole * (1 + 1e-9)
                ]
                most[d] = max(most[d], max(fits, default=0))
        recomputed = recomputed_after(cut, shares_kept(form, most, levels))
        remade = stages_of(cut, recomputed)
        if remade:
            costs = self.costs_with_recompute(c, form, recomputed)
        return self.least_step(c, costs, remade) * (1 - 1e-9)

    def _largest(self, p: Prediction) -> list[float]:
        """Per device, the most bytes that a micro-batch in flight has on a stage of it."""
        most = [0.0] * p.candidate.stages
        for s, held in enumerate(self._held_of_each(p).tolist()):
            for row in p.form.placement:
                most[row[s]] = max(most[row[s]], held)
        return most

    def _held_of_each(self, p: Prediction) -> Figures:
        """Per stage, the bytes that a micro-batch in flight has: its activations, or those of its tasks' graphs."""
        c, train = p.candidate, self.train
        if not any(memory.graphs for memory in p.memory):
            return self._terms_of(c)["kept"]
        each = parameter_bytes(self.profile.dtype, train.optimizer, train.momentum)
        split = not c.form.joint
        return np.array([stage_memory(self.profile, own, c.microbatch, each, split=split).slot for own in p.cut])

    def room(self, p: Prediction) -> int:
        """Micro-batches of a stage that every device could have in flight beside everything else it holds."""
        size = float(p.form.size)
        most = [
            (capacity - memory.total + memory.in_flight) / (one * size)
            for capacity, memory, one in zip(p.capacities, p.memory, self._largest(p), strict=True)
        ]
        return max(0, floor(min(most)))


def _takes_limits(c: Candidate) -> bool:
    """Return whether the candidate's family also runs with fewer activations in flight."""
    options = SCHEDULES[c.schedule].options
    return "memory_limit" in options and "unit" not in options and c.memory_limit is None and c.slices == 1


def shares_kept(form: Form, level: Sequence[int], levels: int) -> Keep:
    """Per stage, the share of its layers that are kept at these levels of the devices that hold it."""
    return tuple(min(level[row[s]] for row in form.placement) / levels for s in range(form.stages))
