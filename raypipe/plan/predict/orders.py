"""The orders that candidates run, each made and linked once: what a search spends most of its time on.

The same order serves every micro-batch size and every width with the same number of micro-batches.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import cached_property

from raypipe.plan.candidate import Candidate
from raypipe.plan.plan import left_by_frozen, sharded
from raypipe.schedule import generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import JOINT
from raypipe.schedule.passes import add_recompute, add_updates, keep_activations, place_gradient_sync
from raypipe.schedule.passes.backward import MOST
from raypipe.schedule.passes.sync import Sync, last_gradients, sync_order
from raypipe.schedule.shape import pipeline_shape
from raypipe.schedule.walk import walk
from raypipe.simulate.period import gains_ahead

Keep = tuple[float, ...]
"""Per stage, the share of micro-batches that are not recomputed."""


@dataclass(eq=False)
class Order:
    """Compute tasks of one data-parallel copy, and what follows from them whatever they cost."""

    schedule: Schedule
    _whole: dict[tuple[Sync | None, int], Order] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.schedule.joined:  # a run executes the halves of a pair one after another
            self.schedule = self.schedule.unpaired()

    @cached_property
    def tasks(self) -> int:
        """How many."""
        return sum(map(len, self.schedule.orders))

    @cached_property
    def graph(self) -> TaskGraph:
        """Dependencies resolved."""
        return link(self.schedule)

    @cached_property
    def counts(self) -> dict[tuple[str, int], int]:
        """(kind, stage) -> micro-batch ids that its tasks carry."""
        result: dict[tuple[str, int], int] = {}
        for kind, stage, mbs, _ in self.schedule.tasks():
            result[kind, stage] = result.get((kind, stage), 0) + len(mbs)
        return result

    def work(self, costs: CostTable) -> float:
        """Time of all compute tasks."""
        backwards, size = self.schedule.backwards, float(self.schedule.size)
        total = 0.0
        for (kind, stage), count in self.counts.items():
            alone = kind in JOINT and not backwards[stage].input_grad  # W alone
            total += count * size * costs.by_kind("W" if alone else kind)[stage]
        return total

    def whole(self, sync: Sync | None, copies: int = 2) -> Order:
        """With gradient sums of data-parallel copies (unless None) and updates, as the runtime will place them.

        ``copies`` matters to sharded orders alone: shards of all copies need no further sum.
        """
        key = (sync, copies if self.schedule.sharding is not None else 2)
        if key not in self._whole:
            placed = self.schedule
            if sync is not None:
                placed = place_gradient_sync(self.schedule, sync, copies=key[1], graph=self.graph)
            self._whole[key] = Order(add_updates(placed))
        return self._whole[key]

    @cached_property
    def last_gradients(self) -> dict[tuple[int, int], int]:
        """(stage, replica) -> number of the task that completes its gradients."""
        return last_gradients(self.graph)

    @cached_property
    def gains_ahead(self) -> bool:
        """The runtime will run ahead of the global gradient norm with it, where a job clips (``parallel.update``)."""
        if self.schedule.versions != "flush":
            return False
        return gains_ahead(self.whole(None).schedule, CostTable.even(self.schedule.stages))

    @cached_property
    def sync_order(self) -> list[int]:
        """Stages in the order in which ``place_gradient_sync`` has them all-reduced at even costs."""
        costs = CostTable.even(self.schedule.stages)
        end = walk(self.graph, costs.durations(self.schedule, self.graph.tasks)).end
        return sync_order(self.graph, self.last_gradients, end)


MOST_TASKS = 1_500_000
"""Tasks of all orders kept: a few hundred megabytes."""


class Orders:
    """Orders by shape, the ones used last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[object, Order] = OrderedDict()
        self._tasks = 0

    def of(
        self,
        c: Candidate,
        count: int,
        keep: Keep | None = None,
        remade: frozenset[int] | None = None,
        frozen: tuple[int, ...] = (),
        close: bool = True,
    ) -> Order:
        """Return what one data-parallel copy runs with ``count`` micro-batches, as the runtime will make it.

        Where the candidate recomputes: all but what ``keep`` says, on the stages ``remade`` (None: on all). ``frozen``:
        stages without a trained parameter; ``close``: see ``plan.left_by_frozen``.

        Raises:
            ScheduleError: the family has no such shape.
        """
        shape = pipeline_shape(c, count)
        divided = (c.shard, c.gather, c.shard_replicas) if c.shard != "none" else None
        whole = c.form.stages * c.microbatches  # of which ``count`` micro-batches may be the beginning
        close = close and divided is None and bool(frozen) and whole <= MOST
        key = (c.schedule, shape, c.recompute != "none", keep, remade, divided, frozen, close)
        result = self._kept.get(key)
        if result is not None:
            self._kept.move_to_end(key)
            return result
        if divided is not None:
            plain = self.of(replace(c, shard="none"), count, keep, remade, frozen, close=False)
            schedule = sharded(plain.schedule, c)
        elif c.recompute == "none":
            named = self.of(c, count).schedule if frozen else generate(c.schedule, shape)
            schedule = left_by_frozen(named, frozen, close)
        elif keep is not None:  # a search for shares asks for several
            all_of_it = self.of(c, count, remade=remade, frozen=frozen, close=close)
            schedule = keep_activations(all_of_it.schedule, keep)
        else:
            bare = self.of(replace(c, recompute="none"), count, frozen=frozen, close=close).schedule
            schedule = add_recompute(bare, "early", remade) if remade is None or remade else bare
        order = self._kept[key] = Order(schedule)
        self._tasks += order.tasks
        while self._tasks > MOST_TASKS and len(self._kept) > 1:
            self._tasks -= self._kept.popitem(last=False)[1].tasks
        return order
