"""Emulated all-reduces, which run one after another on each device while it computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from raypipe.runtime.clocks.shared_clock import SharedClock


class AllReduceLane:
    """Emulates the all-reduces of one device with the simulator's rule for when they begin.

    An all-reduce begins when its last holder has issued it and has finished its previous one. A thread exchanges these
    times with the other holders while the device computes.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], clock: SharedClock) -> None:
        self.groups, self.clock = groups, clock
        self._todo: queue.SimpleQueue[tuple[int, int, float, float] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, float] | BaseException] = queue.SimpleQueue()
        self._open = 0
        self._thread: threading.Thread | None = None

    def join(self, index: int, stage: int, duration: float) -> None:
        """Issue the all-reduce of a stage now; ``index`` names it in ``finish``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="raypipe-sums", daemon=True)
            self._thread.start()
        self._open += 1
        self._todo.put((index, stage, time.monotonic(), duration))

    def finish(self) -> list[tuple[int, float]]:
        """Wait until the ends of all issued all-reduces are known.

        Returns (index, end) of each, the end in seconds on this host's monotonic clock, perhaps in the future. Raises
        the error of the thread, if it failed.
        """
        ends = []
        for _ in range(self._open):
            result = self._done.get()
            if isinstance(result, BaseException):
                raise result
            ends.append(result)
        self._open = 0
        return ends

    def _work(self) -> None:
        free = float("-inf")
        try:
            while (item := self._todo.get()) is not None:
                index, stage, issued, duration = item
                begin = max(issued, free)
                group = self.groups.get(f"stage {stage}")
                if group is not None:
                    own = torch.full((group.size(),), self.clock.shared(begin), dtype=torch.float64)
                    begins = torch.empty_like(own)
                    dist.all_to_all_single(begins, own, group=group)  # one hop, as in norm.Shares
                    begin = self.clock.local(float(begins.max()))
                free = begin + duration
                self._done.put((index, free))
        except BaseException as error:
            self._done.put(error)

    def close(self) -> None:
        """End the thread after the all-reduces that were issued."""
        self._todo.put(None)
        if self._thread is not None:
            self._thread.join()
