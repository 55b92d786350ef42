"""Gradients summed in pieces, the ones that the next forward needs first as early as the link allows.

A bucket holds parameters of one block of the stage, so that a block can be updated when its own sums are in. Large
buckets are summed in pieces, so that a more urgent one need not wait for all of a large one. The pieces are issued in
an order that all holders compute alike (``prioritised_order``): first the order in which a backward completes them,
then the order of a priority queue, by what the holders have measured.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypipe.plan.online.tune_first_k import FirstKTuner
from raypipe.runtime.backward.waiting import LayerPeaks, WaitingOperands
from raypipe.runtime.clocks.clock import Clock, Mark
from raypipe.runtime.update.buckets import BucketedAllReduce, FlatGradients, Piece
from raypipe.runtime.update.collectives import PendingSum, Push, wait_for
from raypipe.schedule.families.reverse_first_k import HeldMemory

PIECE_BYTES = 4 << 20
"""Of the order of ByteScheduler's partitions: large enough for a link's bandwidth, small enough to be waited for."""


def pieces_of(buckets: Sequence[FlatGradients], most_bytes: int) -> list[Piece]:
    """Divide buckets into pieces of at most ``most_bytes``, in order."""
    found = []
    for number, bucket in enumerate(buckets):
        each = max(1, most_bytes // bucket.parameters[0].element_size())
        found += [Piece(number, at, min(at + each, bucket.size)) for at in range(0, bucket.size, each)]
    return found


class PrioritisedAllReduce(BucketedAllReduce):
    """Sums the gradients of one stage replica over its holders.

    Args:
        blocks: the parameters of each block of the stage, in the order of its forward; the same on every holder.
        group: the process group of the holders.
        what: names the all-reduce in errors.
        tuner: chooses how many blocks' weight gradients are postponed; None: none are.
        dtype: of the sums; None for that of the gradients.
        waiting: will hold, per weight, the bytes that its gradient waits for where it is postponed.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[nn.Parameter]],
        group: dist.ProcessGroup,
        what: str,
        tuner: FirstKTuner | None = None,
        dtype: torch.dtype | None = None,
        waiting: WaitingOperands | None = None,
    ) -> None:
        self._blocks, self.tuner, self._waiting = blocks, tuner, WaitingOperands() if waiting is None else waiting
        self._block_of: list[int] = []
        """Per bucket."""
        super().__init__([p for block in blocks for p in block], group, what, dtype)
        self.pieces = pieces_of(self.buckets, PIECE_BYTES)
        """In the order in which the next forward needs them."""
        k = tuner.k if tuner is not None else 0
        late = [piece for piece in self.pieces if self._block_of[piece.bucket] < k]
        self.order = [*self.pieces[len(late) :][::-1], *late]
        self._bytes = [
            (piece.end - piece.begin) * self.buckets[piece.bucket].parameters[0].element_size() for piece in self.pieces
        ]
        self._works_of = defaultdict[int, list[PendingSum]](list)
        self._complete_at: dict[int, float] = {}
        self._held: HeldMemory | None = None
        """What the step's last backward held, in steps whose report has use for it."""
        self._issued_at: list[float] = []
        self._begun: float | None = None
        """When the last backward of the step began."""
        self._ends: list[float] = []
        """Ends of the steps since the holders told one another."""
        self._steps = 0
        self._told: tuple[dist.Work, Tensor] | None = None

    def divide(self, parameters: Sequence[nn.Parameter]) -> list[FlatGradients]:
        """Divide the parameters into buckets of one dtype and one block each, in the order of the blocks."""
        found = []
        for number, block in enumerate(self._blocks):
            by_dtype = defaultdict[torch.dtype, list[nn.Parameter]](list)
            for p in block:
                by_dtype[p.dtype].append(p)
            found += [FlatGradients(some) for some in by_dtype.values()]
            self._block_of += [number] * len(by_dtype)
        return found

    def begin_step(self) -> None:
        """Take over the order that follows from what the holders told one another in the step before."""
        self._hear()
        self._waiting.watched = self.tuner is not None and self.tuner.wants_memory and self._reports(self._steps + 1)

    def _hear(self) -> None:
        if self._told is None:
            return
        (work, told), self._told = self._told, None
        wait_for(self.what, work, lambda: False)
        count = len(self.buckets)
        ready, (per_byte, step_s) = told[:count].tolist(), told[count : count + 2].tolist()
        if self.tuner is not None:
            held = self._take_memory(told[count + 2 :])
            by_block, sums = [0.0] * len(self._blocks), [0.0] * len(self._blocks)
            for bucket, at in enumerate(ready):
                by_block[self._block_of[bucket]] = max(at, by_block[self._block_of[bucket]])
            for piece, nbytes in zip(self.pieces, self._bytes, strict=True):
                sums[self._block_of[piece.bucket]] += per_byte * nbytes
            by_block = self.tuner.observe(self._steps, by_block, sums, step_s, held)
            ready = [by_block[block] for block in self._block_of]
        order = prioritised_order([ready[piece.bucket] for piece in self.pieces], [per_byte * n for n in self._bytes])
        self.order = [self.pieces[n] for n in order]

    @contextmanager
    def watch_backward(self, postponed: Collection[Tensor] = ()) -> Iterator[None]:
        """See BucketedAllReduce.watch_backward."""
        self._begun = time.monotonic()
        watched = self._waiting.watched
        meter = LayerPeaks(self.buckets[0].flat.device, self._waiting, self._blocks) if watched else None
        with super().watch_backward(postponed), meter or nullcontext():
            yield
        self._held = meter.found() if meter is not None else None

    def expect(self, parameters: Iterable[Tensor], among: Collection[Tensor] | None = None) -> None:
        """See BucketedAllReduce.expect."""
        if self._begun is None:
            self._begun = time.monotonic()
        super().expect(parameters, among)

    def completed(self, bucket: int) -> None:
        """See BucketedAllReduce.completed."""
        self._complete_at[bucket] = time.monotonic()

    def issued(self, piece: Piece, work: PendingSum) -> None:
        """See BucketedAllReduce.issued."""
        self._issued_at.append(time.monotonic())
        self._works_of[piece.bucket].append(work)

    def take(self, bucket: int, push: Push) -> FlatGradients:
        """Wait for the sum of one bucket, and make it its parameters' gradients.

        Raises:
            TransportError: another holder did not join in time.
        """
        for work in self._works_of.pop(bucket, ()):
            wait_for(self.what, work, push)
        self.buckets[bucket].open()
        return self.buckets[bucket]

    def finish(self, push: Push, clock: Clock) -> Mark:
        """See BucketedAllReduce.finish. Now and then the holders tell one another what they have measured."""
        seen = self._seen
        end = super().finish(push, clock)
        self._steps += 1
        self._ends.append(time.monotonic())
        # In steps 1, 2, 4, 8, ...: the first ones are slow, and later ones may change with the machine's load. The
        # host's clock cannot say when a GPU has completed a gradient; there, pieces go in the order of the backward.
        if self._reports(self._steps):
            begun = self._ends[-1] if self._begun is None else self._begun
            ready = [max(0.0, self._complete_at.get(n, begun) - begun) for n in range(len(self.buckets))]
            spent = _union(self._issued_at, sorted(seen)) / max(1, sum(self._bytes))
            steps_s = [after - before for before, after in pairwise(self._ends)]
            memory = self._tell_memory()
            told = torch.tensor([*ready, spent, median(steps_s) if steps_s else 0.0, *memory], dtype=torch.float64)
            self._ends = self._ends[-1:]
            work = dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
            assert work is not None
            self._told = work, told
        self._works_of.clear()
        self._complete_at, self._held, self._issued_at, self._begun = {}, None, [], None
        return end

    def _reports(self, step: int) -> bool:
        """Return whether the holders tell one another what they have measured until this step."""
        return bool(self.buckets) and self.buckets[0].parameters[0].device.type == "cpu" and not step & (step - 1)

    def _tell_memory(self) -> list[float]:
        """Return what the holders tell one another of memory: what the backward held, per block, and what this device
        has, as a number that is larger for less."""
        if self.tuner is None or self.tuner.memory is None or not self.tuner.wants_memory:
            return []
        none = [0.0] * len(self._blocks)  # where nothing was watched: a schedule that splits the backward
        held = self._held or HeldMemory(0.0, none, none, none)
        return [held.above, *held.held, *held.apart, *held.waiting, -self.tuner.memory]

    def _take_memory(self, told: Tensor) -> HeldMemory | None:
        """Take in the most that any holder has told, per block; None if nobody has."""
        count = len(self._blocks)
        if self.tuner is None or not len(told) or not told[:count].any():
            return None
        above, *rows, less = told.tolist()
        self.tuner.memory = -less
        return HeldMemory(above, rows[:count], rows[count : 2 * count], rows[2 * count :])


def _union(begins: Sequence[float], ends: Sequence[float]) -> float:
    """Return how long at least one all-reduce was under way; both ascend, and no end comes before its begin."""
    total, until = 0.0, float("-inf")
    for begin, end in zip(begins, ends, strict=False):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


# The order in which the pieces of a stage's gradients are summed: as a priority queue on their link would serve them.
#
# All members of a process group must issue its collectives in one order, and they see their gradients complete at
# slightly different times. So no queue decides while the step runs: from what all members have measured of an earlier
# step, each of them computes the same order beforehand, and then issues the pieces in it, each when it is complete. A
# queue that the members agree on piece by piece would need a message to all before each, behind the pieces on the link.
#
# Source: Peng et al. 2019 (ByteScheduler) for the queue; Oh et al. 2022 (OOO backprop), section 5.1.


def prioritised_order(ready: Sequence[float], seconds: Sequence[float]) -> list[int]:
    """Return the pieces in the order in which a link sends them that always takes the most urgent complete one.

    Args:
        ready: when each piece is complete, in seconds from any moment; the most urgent piece comes first.
        seconds: how long the link takes for each.

    >>> prioritised_order([3.0, 2.0, 1.0], [0.5, 0.5, 0.5]), prioritised_order([3.0, 2.0, 1.0], [1.0, 1.0, 4.0])
    ([2, 1, 0], [2, 0, 1])
    """
    coming = sorted(range(len(ready)), key=lambda piece: (ready[piece], piece), reverse=True)
    waiting: list[int] = []
    order: list[int] = []
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, ready[coming[-1]])
        while coming and ready[coming[-1]] <= now:
            heapq.heappush(waiting, coming.pop())
        piece = heapq.heappop(waiting)
        order.append(piece)
        now += seconds[piece]
    return order
