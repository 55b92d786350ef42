"""Gradients of a stage replica in flat buckets, each all-reduced as soon as its gradients are complete.

A bucket is one contiguous tensor, and the gradients of its parameters are views of it from the first backward of a step
to the update: nothing is copied before or after the all-reduce. (It is allocated anew in every step, because until the
first backward its memory is better used for activations.) Buckets are filled from the last parameter to the first,
roughly the order in which a backward completes gradients, and they are all-reduced in that order on every device,
because a group's collectives must be issued in one order everywhere.

Source: Li et al. 2020 (PyTorch Distributed, arXiv:2006.15704), sections 3.2.2 and 3.2.3.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypipe.plan.online.tune_first_k import FirstKTuner
from raypipe.runtime.backward.waiting import LayerPeaks, WaitingOperands
from raypipe.runtime.process.clock import Clock, Mark
from raypipe.runtime.update.collectives import Pending, Push, start_sum, wait_for
from raypipe.schedule.families.out_of_order import HeldMemory

FIRST_BUCKET_BYTES = 1 << 20
"""A small first bucket starts the communication early."""
BUCKET_BYTES = 25 << 20
"""Large enough for a link's full bandwidth; torch's DistributedDataParallel uses the same size."""


def buckets_of(parameters: Sequence[nn.Parameter], apart: Collection[Tensor] = ()) -> list[FlatGradients]:
    """Divide parameters into buckets of one dtype each, from the last to the first; none holds ``apart`` and others."""
    result: list[list[nn.Parameter]] = []
    room = 0
    for p in reversed(parameters):
        size = p.numel() * p.element_size()
        if not result or size > room or result[-1][0].dtype != p.dtype or (result[-1][0] in apart) != (p in apart):
            room = BUCKET_BYTES if result else FIRST_BUCKET_BYTES
            result.append([])
        result[-1].append(p)
        room -= size
    return [FlatGradients(one) for one in result]


class Piece(NamedTuple):
    """A part of a bucket that one all-reduce sums: elements ``begin`` to ``end`` (exclusive) of a bucket."""

    bucket: int
    begin: int
    end: int


class BucketedAllReduce:
    """Sums the gradients of one stage replica over its holders.

    Args:
        buckets: of the gradients that are summed, the same on every holder.
        group: the process group of the holders.
        what: names the all-reduce in errors.
        dtype: of the sums; None for that of the gradients.
        experts: parameters that have fewer holders, and their process group.
    """

    def __init__(
        self,
        buckets: Sequence[FlatGradients],
        group: dist.ProcessGroup,
        what: str,
        dtype: torch.dtype | None = None,
        experts: tuple[frozenset[Tensor], dist.ProcessGroup | None] = (frozenset(), None),
    ) -> None:
        self.buckets, self.group, self.what, self.dtype, self._experts = buckets, group, what, dtype, experts
        self.order: Sequence[Piece] = [Piece(n, 0, bucket.size) for n, bucket in enumerate(buckets)]
        """What is summed one after the other."""
        self._bucket_of: dict[Tensor, int] = {p: n for n, bucket in enumerate(buckets) for p in bucket.parameters}
        self._open = False
        self._forget()

    def _forget(self) -> None:
        """Forget what is under way."""
        self._missing: list[int] = []
        """Per bucket, how many of its gradients are not complete yet; empty while nobody watches."""
        self._left: Counter[Tensor] = Counter()
        """Deferred computations that are still to come, by parameter."""
        self._works: defaultdict[int, list[Pending]] = defaultdict(list)
        """By bucket; what is summed beside them has -1."""
        # When the last backward began, a bucket was complete, a piece was issued and a sum was there.
        self._begun: float | None = None
        self._complete_at: dict[int, float] = {}
        self._issued_at: list[float] = []
        self._seen: list[Mark] = []

    def begin_step(self) -> None:
        """Note that a step begins."""

    def keep_memory(self) -> list[Tensor]:
        """Let the buckets have the same memory in every step from now on; return the parameters."""
        for bucket in self.buckets:
            bucket.lasting = True
        return list(self._bucket_of)

    def open(self) -> None:
        """Let gradients accumulate in the buckets from now on; does nothing if they do already."""
        if not self._open:
            self._open = True
            for bucket in self.buckets:
                bucket.open()

    def leave(self) -> list[dist.ProcessGroup]:
        """Let go of the process groups and of what is under way on them; return them."""
        held = [group for group in (self.group, self._experts[1]) if group is not None]
        self.__dict__.pop("group", None)
        self._experts = frozenset(), None
        self._forget()
        return held

    def close(self) -> None:
        """Drop the gradients, after the update."""
        self._open = False
        for bucket in self.buckets:
            bucket.close()

    @contextmanager
    def watch_backward(self, postponed: Collection[Tensor] = ()) -> Iterator[None]:
        """Start each bucket's all-reduce inside the block as soon as autograd has accumulated its last gradient.

        The block must hold exactly one backward, the last one of the step for these parameters. ``postponed``: the
        parameters to which something may be added after it; see ``expect``.
        """
        self._watch()
        watched = [p for bucket in self.buckets for p in bucket.parameters if p not in postponed]
        hooks = [p.register_post_accumulate_grad_hook(self._complete) for p in watched]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _watch(self) -> None:
        self._begun = time.monotonic()
        self._missing = [len(bucket.parameters) for bucket in self.buckets]

    def expect(self, parameters: Iterable[Tensor], among: Collection[Tensor] | None = None) -> None:
        """Announce the deferred gradients that ``computed`` will report; all others are complete now.

        Args:
            parameters: one entry for each deferred computation, so a parameter may be named several times.
            among: the parameters that ``watch_backward`` has left out; None if it has watched nothing.
        """
        self._left = Counter(p for p in parameters if p in self._bucket_of)
        if among is None:
            self._watch()
        for p in self._bucket_of:
            if p not in self._left and (among is None or p in among):
                self._complete(p)

    def computed(self, parameter: Tensor) -> None:
        """Note that one of a parameter's deferred computations has been done; see ``expect``."""
        if parameter in self._left:
            self._left[parameter] -= 1
            if not self._left[parameter]:
                self._complete(parameter)

    def _complete(self, parameter: Tensor) -> None:
        bucket = self._bucket_of[parameter]
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            self._complete_at[bucket] = time.monotonic()
        while len(self._issued_at) < len(self.order) and not self._missing[self.order[len(self._issued_at)].bucket]:
            self._start()

    def start(self, beside: Tensor | None = None) -> None:
        """Start the all-reduce of every bucket that has not been started yet, and that of ``beside``, in place."""
        while len(self._issued_at) < len(self.order):
            self._start()
        if beside is not None:
            self._all_reduce(-1, beside, self.group)

    def _start(self) -> None:
        piece = self.order[len(self._issued_at)]
        bucket = self.buckets[piece.bucket]
        bucket.open()  # also takes in what was computed elsewhere
        group = self._experts[1] if bucket.parameters[0] in self._experts[0] else self.group
        self._all_reduce(piece.bucket, bucket.flat[piece.begin : piece.end], group, self.dtype)
        self._issued_at.append(time.monotonic())

    def _all_reduce(self, bucket: int, flat: Tensor, group: Any, dtype: torch.dtype | None = None) -> None:
        work, _ = start_sum(flat, group, dtype)
        if flat.device.type == "cpu":  # the host's clock can say when, in the middle of whatever task
            seen = self._seen  # of this step: a callback may come when the next one has begun
            work.get_future().add_done_callback(lambda _: seen.append(time.monotonic()))
        self._works[bucket].append(work)

    def finish(self, push: Push, clock: Clock) -> Mark:
        """Wait for every started all-reduce.

        Returns when the last one was complete; where the host's clock cannot say, when that was seen here.

        Raises:
            TransportError: another holder did not join in time.
        """
        for work in (work for works in self._works.values() for work in works):
            wait_for(self.what, work, push)
        end = max(self._seen) if self._seen else clock.mark()
        self.finished()
        self._forget()
        return end

    def finished(self) -> None:
        """Note that the step's sums are there."""


# Gradients that accumulate in one flat tensor, so that a collective needs no copy before or after it.


class FlatGradients:
    """The gradients of some parameters of one dtype, which are views of one flat tensor from ``open`` to ``close``.

    Args:
        parameters: in the order in which their gradients lie in the flat tensor.
        size, offsets: elements of the flat tensor and each one's first, if there are zeros beside the parameters' own.
        dtype: of the gradients; None for that of the parameters.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        size: int = 0,
        offsets: Sequence[int] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        self._dtype = dtype
        self.parameters = tuple(parameters)
        *first, end = accumulate((p.numel() for p in parameters), initial=0)
        self.size, self._offsets = size or end, offsets or first
        self._views: list[Tensor] = []
        self.flat = torch.empty(0)
        self.lasting = False
        """Whether every step has the same memory; else it is allocated anew."""
        self._kept: tuple[Tensor, list[Tensor]] | None = None

    @property
    def opened(self) -> bool:
        """Return whether gradients accumulate in the flat tensor now."""
        return bool(self._views)

    def open(self) -> None:
        """Let gradients accumulate in the flat tensor; those that were computed elsewhere are copied into it."""
        if not self._views and self._kept is not None:
            self.flat, self._views = self._kept
            self.flat.zero_()
        elif not self._views:
            first = self.parameters[0]
            self.flat = torch.zeros(self.size, dtype=self._dtype or first.dtype, device=first.device)
            places = zip(self._offsets, self.parameters, strict=True)
            self._views = [self.flat[at : at + p.numel()].view(p.shape) for at, p in places]
        for p, view in zip(self.parameters, self._views, strict=True):
            if p.grad is not view:
                if p.grad is not None:
                    view.copy_(p.grad)
                p.grad = view

    def close(self) -> Tensor:
        """Drop the gradients; returns the flat tensor, which is freed unless somebody keeps it."""
        for p in self.parameters:
            p.grad = None
        if self.lasting and self._views:
            self._kept = self.flat, self._views
        flat, self._views, self.flat = self.flat, [], torch.empty(0)
        return flat


# Gradients summed in pieces, the ones that the next forward needs first as early as the link allows.
#
# A bucket holds parameters of one block of the stage, so that a block can be updated when its own sums are in. Large
# buckets are summed in pieces, so that a more urgent one need not wait for all of a large one. The pieces are issued in
# an order that all holders compute alike (``prioritised_order``): first the order in which a backward completes them,
# then the order of a priority queue, by what the holders have measured.


PIECE_BYTES = 4 << 20
"""Of the order of ByteScheduler's partitions: large enough for a link's bandwidth, small enough to be waited for."""


def pieces_of(buckets: Sequence[FlatGradients], most_bytes: int) -> list[Piece]:
    """Divide buckets into pieces of at most ``most_bytes``, in order."""
    result = []
    for number, bucket in enumerate(buckets):
        each = max(1, most_bytes // bucket.parameters[0].element_size())
        result += [Piece(number, at, min(at + each, bucket.size)) for at in range(0, bucket.size, each)]
    return result


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
        alike = defaultdict[tuple[int, torch.dtype], list[nn.Parameter]](list)
        for number, block in enumerate(blocks):
            for p in block:
                alike[number, p.dtype].append(p)
        self._block_of = [number for number, _ in alike]
        """Per bucket."""
        super().__init__([FlatGradients(some) for some in alike.values()], group, what, dtype)
        self.pieces = pieces_of(self.buckets, PIECE_BYTES)
        """In the order in which the next forward needs them."""
        k = tuner.k if tuner is not None else 0
        late = [piece for piece in self.pieces if self._block_of[piece.bucket] < k]
        self.order = [*self.pieces[len(late) :][::-1], *late]
        self._bytes = [
            (piece.end - piece.begin) * self.buckets[piece.bucket].parameters[0].element_size() for piece in self.pieces
        ]
        self._held: HeldMemory | None = None
        """What the step's last backward held, in steps whose report has use for it."""
        self._ends: list[float] = []
        """Ends of the steps since the holders told one another."""
        self._steps = 0
        self._told: tuple[dist.Work, Tensor] | None = None

    def begin_step(self) -> None:
        """Take over the order that follows from what the holders told one another in the step before."""
        if self._told is not None:
            (work, told), self._told = self._told, None
            wait_for(self.what, work, lambda: False)
            count = len(self.buckets)
            per_byte, step_s, *memory = told[count:].tolist()
            self._reorder(told[:count].tolist(), per_byte, step_s, memory)
        self._waiting.watched = self.tuner is not None and self.tuner.wants_memory and self._reports(self._steps + 1)

    def _reorder(self, ready: list[float], per_byte: float, step_s: float, memory: list[float]) -> None:
        if self.tuner is not None:
            by_block, sums = [0.0] * len(self._blocks), [0.0] * len(self._blocks)
            for block, at in zip(self._block_of, ready, strict=True):
                by_block[block] = max(at, by_block[block])
            for piece, nbytes in zip(self.pieces, self._bytes, strict=True):
                sums[self._block_of[piece.bucket]] += per_byte * nbytes
            held, n = None, len(self._blocks)
            if any(memory[: n + 1]):  # else nobody has watched: a schedule that splits the backward
                held = HeldMemory(memory[0], memory[1 : n + 1], memory[n + 1 : 2 * n + 1], memory[2 * n + 1 : -1])
                self.tuner.memory = -memory[-1]
            by_block = self.tuner.observe(self._steps, by_block, sums, step_s, held)
            ready = [by_block[block] for block in self._block_of]
        order = prioritised_order([ready[piece.bucket] for piece in self.pieces], [per_byte * n for n in self._bytes])
        self.order = [self.pieces[n] for n in order]

    @contextmanager
    def watch_backward(self, postponed: Collection[Tensor] = ()) -> Iterator[None]:
        """See BucketedAllReduce.watch_backward."""
        watched = self._waiting.watched
        meter = LayerPeaks(self.buckets[0].flat.device, self._waiting, self._blocks) if watched else None
        with super().watch_backward(postponed), meter or nullcontext():
            yield
        self._held = meter.found() if meter is not None else None

    def take(self, bucket: int, push: Push) -> None:
        """Wait for the sum of one bucket, and make it its parameters' gradients.

        Raises:
            TransportError: another holder did not join in time.
        """
        for work in self._works.get(bucket, ()):
            wait_for(self.what, work, push)
        self.buckets[bucket].open()

    def finished(self) -> None:
        """See BucketedAllReduce.finished. Now and then the holders tell one another what they have measured."""
        self._steps += 1
        self._ends.append(time.monotonic())
        # In steps 1, 2, 4, 8, ...: the first ones are slow, and later ones may change with the machine's load. The
        # host's clock cannot say when a GPU has completed a gradient; there, pieces go in the order of the backward.
        if self._reports(self._steps):
            begun = self._ends[-1] if self._begun is None else self._begun
            ready = [max(0.0, self._complete_at.get(n, begun) - begun) for n in range(len(self.buckets))]
            spent = _union(self._issued_at, sorted(self._seen)) / max(1, sum(self._bytes))
            steps_s = [after - before for before, after in pairwise(self._ends)]
            memory: list[float] = []
            if self.tuner is not None and self.tuner.wants_memory and self.tuner.memory is not None:
                none = [0.0] * len(self._blocks)
                held = self._held or HeldMemory(0.0, none, none, none)
                # The least memory of a holder is the most of its negative.
                memory = [held.above, *held.held, *held.apart, *held.waiting, -self.tuner.memory]
            told = torch.tensor([*ready, spent, median(steps_s) if steps_s else 0.0, *memory], dtype=torch.float64)
            self._ends = self._ends[-1:]
            work = dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
            assert work is not None
            self._told = work, told
        self._held = None

    def _reports(self, step: int) -> bool:
        """Return whether the holders tell one another what they have measured until this step."""
        return bool(self.buckets) and self.buckets[0].parameters[0].device.type == "cpu" and not step & (step - 1)


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
