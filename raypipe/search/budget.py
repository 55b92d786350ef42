"""The time budget of a search."""

from __future__ import annotations

import time

_WALL = 8.0
"""A CPU-time budget ends at the latest after this many times its seconds of wall time, however busy the machine is."""


class Budget:
    """How many seconds a search may take, and how many are left.

    A budget that the user asks for is wall time. The default is CPU time of the searching thread, so that the result
    depends on the work done and not on what else runs on the machine.
    """

    def __init__(self, seconds: float, wall: bool = False) -> None:
        self.seconds, self.wall = seconds, wall
        self._began, self._began_cpu = time.monotonic(), time.thread_time()

    @property
    def elapsed(self) -> float:
        """Seconds of wall time since the start."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds left; 0 or less once the budget is spent."""
        spent = time.monotonic() - self._began
        if not self.wall:
            spent = max(time.thread_time() - self._began_cpu, spent / _WALL)
        return self.seconds - spent

    def part(self, share: float) -> Budget:
        """A separate budget of ``share`` of the seconds left."""
        return Budget(max(0.01, self.left * share), self.wall)
