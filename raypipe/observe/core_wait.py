"""For how long a run's devices waited for a core that other processes, or other devices, had."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

WORTH_SAYING = 0.1
"""Share of the time that is more than a machine's own daemons take."""


class CoreWait:
    """Reads what Linux counts of each process's first thread, which is the one that computes; call ``update`` now and
    then while they live."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._first: dict[int, tuple[int, int]] = {}
        self._last: dict[int, tuple[int, int]] = {}

    def follow(self, pids: Iterable[int]) -> None:
        """From now on these; of processes of this host alone."""
        self._first = {pid: counted for pid in pids if (counted := self._read(pid)) is not None}
        self._last = dict(self._first)

    def update(self) -> None:
        """Look at them again; one that has ended keeps what was seen last."""
        for pid in self._first:
            if (counted := self._read(pid)) is not None:
                self._last[pid] = counted

    @property
    def share(self) -> float | None:
        """Of the time that a device had something to run, the part in which it had no core: the largest over devices.

        None where nobody counts it.
        """
        shares = []
        for pid, (ran, waited) in self._last.items():
            ran, waited = ran - self._first[pid][0], waited - self._first[pid][1]
            if ran + waited:
                shares.append(waited / (ran + waited))
        return max(shares, default=None)

    def _read(self, pid: int) -> tuple[int, int] | None:
        """Nanoseconds that it ran, and that it was ready to run and did not."""
        try:
            ran, waited, _ = (self._proc / str(pid) / "schedstat").read_text(encoding="ascii").split()
        except (OSError, ValueError):  # it ended, or the kernel does not count
            return None
        return int(ran), int(waited)
