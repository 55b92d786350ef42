"""From a candidate and the profile to its step time and memory.

For the memory of each device its order is played, or shorter ones are where it is long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np

from raypipe.cost.kinds import capacities
from raypipe.cost.memory import DeviceMemory, device_memory
from raypipe.cost.profile import Profile
from raypipe.errors import ScheduleError
from raypipe.job.parallel_spec import INNERMOST, ParallelSpec
from raypipe.job.requested_schedule import recomputed_after
from raypipe.plan.candidate import Candidate, candidates, in_slices
from raypipe.plan.predict.at_scale import DIRECT, Figures, of_candidate
from raypipe.plan.predict.form import Form
from raypipe.plan.predict.kinds_cut import KindsCut
from raypipe.plan.predict.oom_fallback import OOMFallback, shares_kept
from raypipe.plan.predict.orders import Keep, Order, Orders
from raypipe.plan.predict.prediction import Cut, Prediction, stages_of
from raypipe.plan.predict.step_bound import busiest_seconds
from raypipe.plan.predict.step_time import StepTime, step_time
from raypipe.schedule import SCHEDULES
from raypipe.schedule.ir import Schedule
from raypipe.schedule.passes.sync import Sync
from raypipe.schedule.shape import Grid, Innermost

FINAL = 60_000
"""Tasks of a step up to which it is timed whole for what is shown in the end (else ``DIRECT``)."""
FEW_MICROBATCHES = 4
"""Micro-batches per stage below which slices are tried where memory does not ask for them."""
NEAR = 5e-3
"""Share of a step by which shards have to shorten it where memory does not ask for them."""
TERMS = tuple(DeviceMemory().terms())
LEVELS = 16
"""Shares of micro-batches kept are multiples of one in so many."""


@dataclass(slots=True)
class Memories:
    """Memory of candidates, each found once."""

    judge: Predictor
    orders: Orders
    _known: dict[object, tuple[DeviceMemory, ...]] = field(default_factory=dict)

    def of_order(
        self,
        c: Candidate | ParallelSpec,
        order: Order,
        cut: Sequence[Sequence[int]],
        recomputed: frozenset[int] | None = None,
        beside_shards: bool = False,
        whole: Schedule | None = None,
    ) -> tuple[DeviceMemory, ...]:
        """Memory of a given order, as a step of this candidate; ``whole``: the same with sums and updates."""
        train = self.judge.train
        return device_memory(
            self.judge.profile,
            cut,
            order.schedule if whole is None else whole,
            c.microbatch,
            copies=c.replicas,
            optimizer=train.optimizer,
            momentum=train.momentum,
            ahead=train.needs_norm and not self.judge.overheads(c, order).waits(order),
            recomputed=recomputed,
            beside_shards=beside_shards,
            captured=train.captures_tasks and c.tensor == 1,
            compiling=train.compiles_beside,
        )

    def of(
        self, c: Candidate, keep: Keep | None = None, recomputed: frozenset[int] | None = None, cut: Cut | None = None
    ) -> tuple[DeviceMemory, ...]:
        """Memory of the candidate's own order.

        Args:
            c: the candidate.
            keep: per stage, the share of micro-batches that are not recomputed.
            recomputed: layers that an R computes again, of those stages that recompute some.
            cut: in place of the candidate's.

        Raises:
            ScheduleError: the family has no such shape.
        """
        cut = self.judge.cut(c) if cut is None else cut
        # Ways of recomputation that keep nothing are one, and each asks for it: to try whether that fits, and after.
        keep = keep if keep is None or any(keep) else None
        recomputed = recomputed if recomputed is None or len(recomputed) < len(self.judge.profile.layers) else None
        way: Literal["none", "full"] = "none" if c.recompute == "none" else "full"
        key = (replace(c, recompute=way, sync="lazy"), keep, recomputed, cut)
        if key not in self._known:
            self._known[key] = self._played(c, keep, recomputed, cut)
        return self._known[key]

    def _played(
        self, c: Candidate, keep: Keep | None, recomputed: frozenset[int] | None, cut: Cut
    ) -> tuple[DeviceMemory, ...]:
        most = capacities(self.judge.profile, c.stages, c.replicas)
        remade, frozen = None if recomputed is None else stages_of(cut, recomputed), self.judge.frozen(cut)

        def measure(count: int, unit: int | None) -> Figures:
            order = self.orders.of(replace(c, unit=unit), count, keep, remade, frozen)
            devices = self.of_order(c, order, cut, recomputed)
            return np.array([value for device in devices for value in device.terms().values()])

        def too_large(found: Figures) -> bool:
            return bool((found.reshape(c.stages, -1).sum(axis=1) > most).any())

        # Of 1F1B, every micro-batch is like the one before, but for which of ``LEVELS`` are kept.
        repeats = LEVELS if SCHEDULES[c.schedule].in_turn and c.slices == 1 else None
        rows = of_candidate(c, measure, known=too_large, repeats=repeats).reshape(c.stages, -1)
        return tuple(DeviceMemory(**dict(zip(TERMS, map(float, row), strict=True))) for row in rows)

    def holds(self, c: Candidate) -> bool:
        """Return whether the candidate fits, all recomputed if it recomputes; False for one that does not exist."""
        try:
            most = capacities(self.judge.profile, c.stages, c.replicas)
            return all(device.total <= limit for device, limit in zip(self.of(c), most, strict=True))
        except ScheduleError:
            return False

    def keep(self, c: Candidate) -> Keep:
        """Per stage, the largest share of micro-batches that memory holds without recomputation.

        Source: Lai et al. 2022 (Merak), section 3.4, whose formula is this for even stages and 1F1B.
        """
        if c.recompute == "full" or not self.holds(c):
            return (0.0,) * c.form.stages
        return self._most_kept(c, LEVELS, lambda shares: self.of(c, shares))

    def recomputed(self, c: Candidate) -> frozenset[int]:
        """Layers that are recomputed if each stage keeps as many of its first ones as its device's memory holds."""
        cut = self.judge.cut(c)
        if not self.holds(c):
            return recomputed_after(cut, (0.0,) * len(cut))

        def memory(shares: Keep) -> tuple[DeviceMemory, ...]:
            return self.of(c, None, recomputed_after(cut, shares))

        return recomputed_after(cut, self._most_kept(c, max(map(len, cut)), memory))

    def _most_kept(self, c: Candidate, levels: int, memory: Callable[[Keep], tuple[DeviceMemory, ...]]) -> Keep:
        """Per stage, the largest share that memory holds, a multiple of one in ``levels``; nothing kept fits.

        Devices fill up independently of one another, so one search serves all of them. Memory is nearly linear in what
        is kept: the first level that is tried lies on the line between nothing and everything, the second beside it,
        and bisection finds the rest.
        """
        most = capacities(self.judge.profile, c.stages, c.replicas)
        low, high = [0] * c.stages, [levels + 1] * c.stages  # holds, holds not
        level, turn = self._on_the_line(c, levels, most), 0
        while any(h - k > 1 for k, h in zip(low, high, strict=True)):
            if turn > 1:
                level = [(k + h) // 2 for k, h in zip(low, high, strict=True)]
            level = [min(max(one, k), max(k, h - 1)) for one, k, h in zip(level, low, high, strict=True)]
            for d, row in enumerate(memory(shares_kept(c.form, level, levels))):
                if row.total <= most[d]:
                    low[d] = level[d]
                else:
                    high[d] = level[d]
            level, turn = [one + 1 if k == one else one - 1 for one, k in zip(level, low, strict=True)], turn + 1
        return shares_kept(c.form, low, levels)

    def _on_the_line(self, c: Candidate, levels: int, most: Sequence[float]) -> list[int]:
        """Per device, the level at which its memory is full if that is linear between nothing and everything kept."""
        none, every = ([device.total for device in self.of(replace(c, recompute=way))] for way in ("full", "none"))
        return [
            int(levels * min(1.0, max(0.0, (limit - least) / max(whole - least, 1.0))))
            for least, whole, limit in zip(none, every, most, strict=True)
        ]


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
class Predictor(OOMFallback):
    """Judges candidates for one job on one cluster; all times are seconds of a step."""

    _orders: Orders = field(default_factory=Orders)
    memories: Memories = field(init=False, repr=False, compare=False)
    _predicted: dict[tuple[Candidate, bool], Prediction] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.memories = Memories(self, self._orders)
        self._kinds_cut = KindsCut(self.profile, self.train, self.memory_with)

    def on(self, grid: Grid) -> Iterator[Candidate]:
        """Return the candidates of a grid, without OOM fallbacks. Copies divide their state where the job asks for it;
        where memory does, see ``oom_fallback``, and where it suffices, ``with_shards``."""
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

    def with_shards(self, p: Prediction) -> Prediction:
        """The prediction, or the fastest of those whose copies divide optimizer state, or gradients too, if that is
        faster by more than ``NEAR``: updates are shorter, and gathers may run beside forwards."""
        if p.candidate.shard != "none" or p.order is not None or p.keep is not None or p.recomputed is not None:
            return p
        result = [p]
        for way in self.shard_ways(p.candidate, 2):
            if self.least(way) < p.step_s * (1 - NEAR):
                try:
                    other = self.predict(way)
                except ScheduleError:
                    continue
                if other.fits and other.step_s < p.step_s * (1 - NEAR):
                    result.append(self.time(other, final=True))
        return min(result, key=lambda p: p.step_s)

    # Exact figures

    def predict(self, c: Candidate, timed: bool = False) -> Prediction:
        """Memory, and the step's time if it fits (or ``timed`` asks for it); else its bound.

        Raises:
            ScheduleError: the family has no such shape.
        """
        if (c, timed) not in self._predicted:
            self._predicted[c, timed] = self._predict(c, timed)
        return self._predicted[c, timed]

    def _predict(self, c: Candidate, timed: bool) -> Prediction:
        keep = self.memories.keep(c) if c.recompute in ("full", "microbatches") else None
        recomputed = self.memories.recomputed(c) if c.recompute == "layers" else None
        result = self.prediction(
            c,
            self.cut(c),
            self.costs(c) if recomputed is None else self.costs_with_recompute(c, c.form, recomputed),
            self.memories.of(c, keep, recomputed),
            step_s=self.least(c),
            keep=keep,
            recomputed=recomputed,
        )
        return self.time(result) if result.fits or timed else result

    def predict_order(self, c: Candidate, schedule: Schedule, cut: Cut | None = None) -> Prediction:
        """Judge an order that was searched: compute tasks of one data-parallel copy; ``cut`` where the candidate's
        placement does not say it."""
        form = Form.of(schedule, "auto")
        if cut is None:
            costs = self.costs(c, form)
        else:
            costs = self.costs_of(c, cut, form.placement, not form.joint, schedule.sharding)
        cut = self.cut(c, form) if cut is None else cut
        memory = self.memories.of_order(c, Order(schedule), cut)
        return self.time(self.prediction(c, cut, costs, memory, order=schedule), final=True)

    def predict_gathers(self, p: Prediction, schedule: Schedule) -> Prediction:
        """Judge a plan of level 3 with gathers of its order's own: tasks of one data-parallel copy, AG, FREE and RS
        among them."""
        c = replace(p.candidate, gather="order")
        memory = self.memories.of_order(c, Order(schedule), p.cut, p.recomputed)
        return self.time(replace(p, candidate=c, memory=memory, order=schedule), final=True)

    def beside_shards(self, p: Prediction, schedule: Schedule) -> list[float]:
        """Return what each device holds at most without gathered weights and full gradients."""
        memory = self.memories.of_order(p.candidate, Order(schedule), p.cut, p.recomputed, beside_shards=True)
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
                result = timed(simpler)
                if result.step <= best.step * (1 + 1e-6):
                    sync, best = simpler, result
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
                held = replace(timed_p, memory=self.memories.of_order(c, whole, p.cut, p.recomputed))
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
        return self.memories.of(c, cut=cut)

    def holds(self, c: Candidate) -> bool:
        """Return whether the candidate fits, all recomputed if it recomputes; False for one that does not exist."""
        return self.memories.holds(c)

    def undivided(self, c: Candidate) -> tuple[DeviceMemory, ...] | None:
        """See ``OOMFallback``; a long step's memory is an estimate, and bounds nothing."""
        if 3 * c.form.stages * c.microbatches > DIRECT:
            return None
        try:
            return self.memories.of(replace(c, shard="none", gather="unit", shard_replicas=None))
        except ScheduleError:
            return None
