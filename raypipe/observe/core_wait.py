"""Measure how long the processes of a run waited for a CPU core."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

WORTH_SAYING = 0.1
"""Waits above this share of the time are reported; daemons of the machine cause less."""


class CoreWait:
    """Measures waiting times from Linux's scheduler statistics of each process's first thread, the one that computes.

    Call ``update`` from time to time while the processes live.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._first: dict[int, tuple[int, int]] = {}
        self._last: dict[int, tuple[int, int]] = {}

    def follow(self, pids: Iterable[int]) -> None:
        """Start measuring these processes, which must run on this host; replaces the ones measured before."""
        self._first = {pid: counted for pid in pids if (counted := self._read(pid)) is not None}
        self._last = dict(self._first)

    def update(self) -> None:
        """Read the statistics again; a process that has ended keeps its last values."""
        for pid in self._first:
            if (counted := self._read(pid)) is not None:
                self._last[pid] = counted

    @property
    def share(self) -> float | None:
        """Share of a process's runnable time in which it waited for a core: the largest over processes.

        None if the kernel provides no statistics.
        """
        shares = []
        for pid, (ran, waited) in self._last.items():
            ran, waited = ran - self._first[pid][0], waited - self._first[pid][1]
            if ran + waited:
                shares.append(waited / (ran + waited))
        return max(shares, default=None)

    def _read(self, pid: int) -> tuple[int, int] | None:
        """Nanoseconds that the process ran, and that it was runnable but waited."""
        try:
            ran, waited, _ = (self._proc / str(pid) / "schedstat").read_text(encoding="ascii").split()
        except (OSError, ValueError):  # the process ended, or the kernel has no statistics
            return None
        return int(ran), int(waited)
