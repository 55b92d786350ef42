"""An expert group whose members are threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor

from raypipe.tensor import group_of_thread
from tests.tensor.threads import Meeting

T = TypeVar("T")


class Member:
    """One member, which counts what it receives."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.brought: list[list[Tensor]] = []

    def all_to_all(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        assert sum(sends) == len(x), (sends, x.shape)
        self.calls.append((tuple(sends), tuple(receives)))
        self.meeting.brought[self.rank] = torch.split(x.detach().clone(), list(sends))  # type: ignore[call-overload]
        self.meeting.wait()
        parts = [brought[self.rank] for brought in self.meeting.brought]
        self.meeting.wait()
        assert [len(part) for part in parts] == list(receives)
        return torch.cat(parts)


def run_copies(size: int, work: Callable[[int, Member], T]) -> list[T]:
    """Return what ``work(rank, member)`` returns on every member of a group, each in its thread."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        member = Member(meeting, rank)
        try:
            with meeting.turn, group_of_thread(member, "experts"):  # type: ignore[arg-type]
                return work(rank, member)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [e for f in futures if (e := f.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, BrokenBarrierError)):
            raise error
        return [f.result() for f in futures]
