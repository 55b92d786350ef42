"""Emulated collectives, which run one after another on each device's network while it computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from raypipe.runtime.clocks.shared_clock import SharedClock


class AllReduceLane:
    """Emulates the all-reduces, gathers and reduce-scatters of one device with the simulator's rule for their begin.

    One begins when its last holder has issued it and has finished its previous one. A thread exchanges these times with
    the other holders while the device computes.

    Args:
        groups: process groups by name.
        clock: of the run.
        pieces: of a step whose sums go in pieces: of each piece its sum's index and its duration, in the order in which
            the link carries them; none for whole collectives in the order in which they are issued.
    """

    def __init__(
        self, groups: Mapping[str, dist.ProcessGroup], clock: SharedClock, pieces: Sequence[tuple[int, float]] = ()
    ) -> None:
        self.groups, self.clock = groups, clock
        self._pieces, self._last = pieces, {index: n for n, (index, _) in enumerate(pieces)}
        self._todo: queue.SimpleQueue[tuple[int, str, float, float] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, float] | BaseException] = queue.SimpleQueue()
        self._open = 0
        self._ends: dict[int, float] = {}
        self._thread: threading.Thread | None = None

    def join(self, index: int, duration: float, group: str) -> None:
        """Issue a collective now; ``index`` names it later, ``group`` the devices that take part: "" for this alone."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="raypipe-sums", daemon=True)
            self._thread.start()
        self._open += 1
        self._todo.put((index, group, time.monotonic(), duration))

    def end_of(self, index: int) -> float:
        """Wait until the end of an issued collective is known; see ``finish``."""
        while index not in self._ends:
            self._take()
        return self._ends[index]

    def take_end(self, index: int) -> float:
        """The same, and forget it: a sum of the next step may then have this index."""
        end = self.end_of(index)
        del self._ends[index]
        return end

    def finish(self) -> list[tuple[int, float]]:
        """Wait until the ends of all collectives issued since the last call are known.

        Returns (index, end) of each, the end in seconds on this host's monotonic clock, perhaps in the future. Raises
        the error of the thread, if it failed.
        """
        while self._open:
            self._take()
        ends, self._ends = list(self._ends.items()), {}
        return ends

    def _take(self) -> None:
        result = self._done.get()
        if isinstance(result, BaseException):
            raise result
        self._ends[result[0]] = result[1]
        self._open -= 1

    def _work(self) -> None:
        free = float("-inf")
        try:
            for index, name, issued, duration, is_last in self._in_pieces() if self._pieces else self._whole():
                begin = max(issued, free)
                if name:
                    group = self.groups[name]
                    own = torch.full((group.size(),), self.clock.shared(begin), dtype=torch.float64)
                    begins = torch.empty_like(own)
                    dist.all_to_all_single(begins, own, group=group)  # one hop, as in norm.Shares
                    begin = self.clock.local(float(begins.max()))
                free = begin + duration
                if is_last:
                    self._done.put((index, free))
        except BaseException as error:
            self._done.put(error)

    def _whole(self) -> Iterator[tuple[int, str, float, float, bool]]:
        """Collectives as they are issued: index, group, when it was issued, duration, and that it is complete then."""
        while (item := self._todo.get()) is not None:
            yield *item, True

    def _in_pieces(self) -> Iterator[tuple[int, str, float, float, bool]]:
        """Pieces of sums in their order, each when its sum has been issued; whether it is the last of the sum."""
        while True:
            issued: dict[int, tuple[str, float]] = {}
            for n, (index, duration) in enumerate(self._pieces):
                while index not in issued:
                    item = self._todo.get()
                    if item is None:
                        return
                    issued[item[0]] = item[1:3]
                yield index, *issued[index], duration, self._last[index] == n

    def close(self) -> None:
        """End the thread after the collectives that were issued."""
        self._todo.put(None)
        if self._thread is not None:
            self._thread.join()
