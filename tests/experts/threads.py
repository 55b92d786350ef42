"""An expert group whose members are threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from tests.tensor.threads import Meeting, run_members

T = TypeVar("T")


class Member:
    """One member, which counts what it receives."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.size = meeting, rank, meeting.size
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.brought: list[list[Tensor]] = []

    def start_all_to_all(
        self, x: Tensor, sends: Sequence[int], receives: Sequence[int]
    ) -> tuple[Tensor, Callable[[], None]]:
        assert sum(sends) == len(x), (sends, x.shape)
        self.calls.append((tuple(sends), tuple(receives)))
        self.meeting.brought[self.rank] = torch.split(x.detach().clone(), list(sends))  # type: ignore[call-overload]
        self.meeting.wait()
        parts = [brought[self.rank] for brought in self.meeting.brought]
        self.meeting.wait()
        assert [len(part) for part in parts] == list(receives)
        return torch.cat(parts), lambda: None


def run_copies(size: int, work: Callable[[int, Member], T], kind: type[Member] = Member) -> list[T]:
    """Return what ``work(rank, member)`` returns on every member of a group, each in its thread."""
    return run_members(size, kind, "experts", work)
