"""How long a search may go on."""

from __future__ import annotations

import time

_WALL = 8.0
"""Times its seconds of wall time that a budget of processor time lasts, however busy the machine is."""


class Budget:
    """Seconds of a search, and how many are left.

    A budget that somebody asked for is wall time. The default one is processor time of the searching thread: what a
    search finds then depends on the work it did and not on what else ran on the machine.
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
        """Seconds left; 0 or less when it is over."""
        spent = time.monotonic() - self._began
        if not self.wall:
            spent = max(time.thread_time() - self._began_cpu, spent / _WALL)
        return self.seconds - spent

    def part(self, share: float) -> Budget:
        """A budget of its own for a part of what is left."""
        return Budget(max(0.01, self.left * share), self.wall)
