"""A group whose members are threads of one process: collectives by meeting at a barrier.

One thread runs at a time, from collective to collective, with the random keys that it set itself: a process keeps one
set of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from raypipe.models.keyed_random import swap_keys
from raypipe.tensor import Axis, group_of_thread

M, T = TypeVar("M"), TypeVar("T")


class Meeting:
    """What the members of one group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.turn = threading.Lock()
        self.brought: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.brought[rank] = x.detach().clone()
        self.wait()
        shapes = {tuple(t.shape) for t in self.brought}
        assert len(shapes) == 1, f"members bring different shapes: {shapes}"
        result = list(self.brought)
        self.wait()
        return result

    def wait(self) -> None:
        keys = swap_keys(None)
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()
        swap_keys(keys)


class TensorRankWork:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.all_reduces = 0

    def start_all_reduce(self, x: Tensor, operation: str = "sum") -> Callable[[], object]:
        all_of_them = torch.stack(self.meeting.exchange(self.rank, x))
        x.copy_(all_of_them.sum(0) if operation == "sum" else all_of_them.amax(0))
        self.all_reduces += 1
        return lambda: None

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self.meeting.exchange(self.rank, x)

    def start_all_gather(self, x: Tensor) -> tuple[Tensor, Callable[[], object]]:
        return torch.stack(self.meeting.exchange(self.rank, x)), lambda: None

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, Callable[[], object]]:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)[self.rank], lambda: None


def run_tensor_ranks(size: int, work: Callable[[int, TensorRankWork], T]) -> list[T]:
    """``work(rank, member)`` on every member of a tensor group, each in its thread; what each returned."""
    return run_members(size, TensorRankWork, "tensor", work)


def run_members(size: int, kind: Callable[[Meeting, int], M], axis: Axis, work: Callable[[int, M], T]) -> list[T]:
    """``work(rank, member)`` on every member of a group of this axis, made by ``kind``, each in its thread.

    Of several errors the first is raised that is not only about another member's.
    """
    meeting = Meeting(size)

    def run(rank: int) -> T:
        member = kind(meeting, rank)
        try:
            with meeting.turn, group_of_thread(member, axis):  # type: ignore[arg-type]
                return work(rank, member)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [e for f in futures if (e := f.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [f.result() for f in futures]
