"""Memory of each device of a candidate: its order is played, or shorter ones are where it is long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from raypipe.cost.kinds import capacities
from raypipe.cost.memory import DeviceMemory, device_memory
from raypipe.cost.profile import Profile
from raypipe.errors import ScheduleError
from raypipe.job.requested_schedule import recomputed_after
from raypipe.job.train_spec import TrainSpec
from raypipe.plan.candidate import Candidate
from raypipe.plan.predict.at_scale import Figures, of_candidate
from raypipe.plan.predict.oom_fallback import shares_kept
from raypipe.plan.predict.orders import Keep, Order, Orders
from raypipe.plan.predict.prediction import Cut, stages_of
from raypipe.plan.predict.step_time import StepOverheads

TERMS = tuple(DeviceMemory().terms())
LEVELS = 16
"""Shares of micro-batches kept are multiples of one in so many."""


class MemoryCosts(Protocol):
    """Questions that memory asks the predictor."""

    profile: Profile
    train: TrainSpec

    def cut(self, c: Candidate) -> Cut:
        """The layers of each stage."""

    def frozen(self, cut: Cut) -> tuple[int, ...]:
        """The stages that have no trained parameter."""

    def overheads(self, c: Candidate) -> StepOverheads:
        """Return what a step has besides its tasks."""


@dataclass(slots=True)
class Memories:
    """Memory of candidates, each found once."""

    judge: MemoryCosts
    orders: Orders
    _known: dict[object, tuple[DeviceMemory, ...]] = field(default_factory=dict)

    def of_order(
        self,
        c: Candidate,
        order: Order,
        cut: Cut,
        recomputed: frozenset[int] | None = None,
        beside_shards: bool = False,
    ) -> tuple[DeviceMemory, ...]:
        """Memory of a given order, as a step of this candidate."""
        train = self.judge.train
        ahead = train.needs_norm and not self.judge.overheads(c).waits(order)
        return device_memory(
            self.judge.profile,
            cut,
            order.schedule,
            c.microbatch,
            copies=c.replicas,
            optimizer=train.optimizer,
            momentum=train.momentum,
            ahead=ahead,
            recomputed=recomputed,
            beside_shards=beside_shards,
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

        rows = of_candidate(c, measure, known=too_large).reshape(c.stages, -1)
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
