"""Emulated all-reduces: one after another on each device, beside its compute."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from raypipe.runtime.shared_clock import SharedClock


class AllReduceLane:
    """The network lane of one device, as the simulator has it: a sum begins when its last holder is there and free.

    A thread of its own asks the other holders; so sums go on while the device computes.
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
        """Index and end of all that were issued, on this host's monotonic clock; waits until the ends are known."""
        found = []
        for _ in range(self._open):
            one = self._done.get()
            if isinstance(one, BaseException):
                raise one
            found.append(one)
        self._open = 0
        return found

    def _work(self) -> None:
        free = float("-inf")
        try:
            while (item := self._todo.get()) is not None:
                index, stage, issued, duration = item
                begin = max(issued, free)
                group = self.groups.get(f"stage {stage}")
                if group is not None:
                    own = torch.full((group.size(),), self.clock.shared(begin), dtype=torch.float64)
                    everybody = torch.empty_like(own)
                    dist.all_to_all_single(everybody, own, group=group)  # one hop, as in norm.Shares
                    begin = self.clock.local(float(everybody.max()))
                free = begin + duration
                self._done.put((index, free))
        except BaseException as error:
            self._done.put(error)

    def close(self) -> None:
        """End the thread, once what was issued is known."""
        self._todo.put(None)
        if self._thread is not None:
            self._thread.join()
