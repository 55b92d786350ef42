"""Emulated collectives, which run one after another on each device's network while it computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from raypipe.runtime.clocks.shared_clock import SharedClock


class AllReduceLane:
    """Emulates the all-reduces, gathers and reduce-scatters of one device with the simulator's rule for their begin.

    One begins when its last holder has issued it and has finished its previous one. A thread exchanges these times with
    the other holders while the device computes.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], clock: SharedClock) -> None:
        self.groups, self.clock = groups, clock
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
            while (item := self._todo.get()) is not None:
                index, name, issued, duration = item
                begin = max(issued, free)
                if name:
                    group = self.groups[name]
                    own = torch.full((group.size(),), self.clock.shared(begin), dtype=torch.float64)
                    begins = torch.empty_like(own)
                    dist.all_to_all_single(begins, own, group=group)  # one hop, as in norm.Shares
                    begin = self.clock.local(float(begins.max()))
                free = begin + duration
                self._done.put((index, free))
        except BaseException as error:
            self._done.put(error)

    def close(self) -> None:
        """End the thread after the collectives that were issued."""
        self._todo.put(None)
        if self._thread is not None:
            self._thread.join()
