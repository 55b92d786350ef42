"""Gradients of a stage replica in flat buckets, each all-reduced as soon as its gradients are complete.

A bucket is one contiguous tensor, and the gradients of its parameters are views of it from the first backward of a step
to the update: nothing is copied before or after the all-reduce. (It is allocated anew in every step, because until the
first backward its memory is better used for activations.) Buckets are filled from the last parameter to the first,
roughly the order in which a backward completes gradients, and they are all-reduced in that order on every device,
because a group's collectives must be issued in one order everywhere.

Source: Li et al. 2020 (PyTorch Distributed, arXiv:2006.15704), sections 3.2.2 and 3.2.3.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypipe.runtime.clocks.clock import Clock, Mark
from raypipe.runtime.update.collectives import PendingSum, Push, start_all_reduce, wait_for

FIRST_BUCKET_BYTES = 1 << 20
"""A small first bucket starts the communication early."""
BUCKET_BYTES = 25 << 20
"""Large enough for a link's full bandwidth; torch's DistributedDataParallel uses the same size."""


def buckets_of(parameters: Sequence[nn.Parameter], first_bytes: int, bytes_each: int) -> list[FlatGradients]:
    """Divide parameters into buckets of one dtype each, from the last parameter to the first."""
    found: list[list[nn.Parameter]] = []
    room = 0
    for p in reversed(parameters):
        size = p.numel() * p.element_size()
        if not found or size > room or found[-1][0].dtype != p.dtype:
            room = bytes_each if found else first_bytes
            found.append([])
        found[-1].append(p)
        room -= size
    return [FlatGradients(one) for one in found]


class Piece(NamedTuple):
    """A part of a bucket that one all-reduce sums: elements ``begin`` to ``end`` (exclusive) of a bucket."""

    bucket: int
    begin: int
    end: int


class BucketedAllReduce:
    """Sums the gradients of one stage replica over its holders.

    Args:
        parameters: the parameters whose gradients are summed, in the same order on every holder.
        group: the process group of the holders.
        what: names the all-reduce in errors.
        dtype: of the sums; None for that of the gradients.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, what: str, dtype: torch.dtype | None = None
    ) -> None:
        self.group, self.what, self.dtype = group, what, dtype
        self.buckets = self.divide(parameters)
        self.order: Sequence[Piece] = [Piece(n, 0, bucket.size) for n, bucket in enumerate(self.buckets)]
        """What is summed one after the other."""
        self._bucket_of: dict[Tensor, int] = {
            p: number for number, bucket in enumerate(self.buckets) for p in bucket.parameters
        }
        self._open = False
        self._missing: list[int] = []
        """Per bucket, how many of its gradients are not complete yet; empty while nobody watches."""
        self._left: Counter[Tensor] = Counter()
        """Deferred computations that are still to come, by parameter."""
        self._works: list[PendingSum] = []
        self._seen: list[Mark] = []
        self._started = 0

    def divide(self, parameters: Sequence[nn.Parameter]) -> list[FlatGradients]:
        """Divide the parameters into buckets."""
        return buckets_of(parameters, FIRST_BUCKET_BYTES, BUCKET_BYTES)

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

    def leave(self) -> dist.ProcessGroup:
        """Let go of the process group and of what is under way on it; return it."""
        group = self.group
        self.__dict__.pop("group", None)
        self._works, self._seen, self._started, self._missing = [], [], 0, []
        return group

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
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        watched = [p for bucket in self.buckets for p in bucket.parameters if p not in postponed]
        hooks = [p.register_post_accumulate_grad_hook(self._complete) for p in watched]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def expect(self, parameters: Iterable[Tensor], among: Collection[Tensor] | None = None) -> None:
        """Announce the deferred gradients that ``computed`` will report; all others are complete now.

        Args:
            parameters: one entry for each deferred computation, so a parameter may be named several times.
            among: the parameters that ``watch_backward`` has left out; None if it has watched nothing.
        """
        self._left = Counter(p for p in parameters if p in self._bucket_of)
        if among is None:
            self._missing = [len(bucket.parameters) for bucket in self.buckets]
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
            self.completed(bucket)
        while self._started < len(self.order) and not self._missing[self.order[self._started].bucket]:
            self._start()

    def completed(self, bucket: int) -> None:
        """Note that all gradients of a bucket are complete."""

    def start(self, beside: Tensor | None = None) -> None:
        """Start the all-reduce of every bucket that has not been started yet, and that of ``beside``, in place."""
        while self._started < len(self.order):
            self._start()
        if beside is not None:
            self._all_reduce(beside)

    def _start(self) -> None:
        piece = self.order[self._started]
        self._started += 1
        bucket = self.buckets[piece.bucket]
        bucket.open()  # also takes in what was computed elsewhere
        self.issued(piece, self._all_reduce(bucket.flat[piece.begin : piece.end], self.dtype))

    def issued(self, piece: Piece, work: PendingSum) -> None:
        """Note that the all-reduce of a piece has been issued."""

    def _all_reduce(self, flat: Tensor, dtype: torch.dtype | None = None) -> PendingSum:
        work = start_all_reduce(flat, self.group, dtype)
        if flat.device.type == "cpu":  # the host's clock can say when, in the middle of whatever task
            seen = self._seen  # of this step: a callback may come when the next one has begun
            work.get_future().add_done_callback(lambda _: seen.append(time.monotonic()))
        self._works.append(work)
        return work

    def finish(self, push: Push, clock: Clock) -> Mark:
        """Wait for every started all-reduce.

        Returns when the last one was complete; where the host's clock cannot say, when that was seen here.

        Raises:
            TransportError: another holder did not join in time.
        """
        for work in self._works:
            wait_for(self.what, work, push)
        end = max(self._seen) if self._seen else clock.mark()
        self._works, self._seen, self._started, self._missing = [], [], 0, []
        return end


# Gradients that accumulate in one flat tensor, so that a collective needs no copy before or after it.


class FlatGradients:
    """The gradients of some parameters of one dtype, which are views of one flat tensor from ``open`` to ``close``.

    Args:
        parameters: in the order in which their gradients lie in the flat tensor.
        size: elements of the flat tensor, if it is padded with zeros beyond the parameters' own.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], size: int | None = None) -> None:
        self.parameters = tuple(parameters)
        self._sizes = [p.numel() for p in parameters]
        self._size = sum(self._sizes) if size is None else size
        self._views: list[Tensor] = []
        self.flat = torch.empty(0)
        self.lasting = False
        """Whether every step has the same memory; else it is allocated anew."""
        self._kept: tuple[Tensor, list[Tensor]] | None = None

    @property
    def size(self) -> int:
        """Elements of the flat tensor."""
        return self._size

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
            self.flat = torch.zeros(self._size, dtype=first.dtype, device=first.device)
            parts = torch.split(self.flat[: sum(self._sizes)], self._sizes)
            self._views = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
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
