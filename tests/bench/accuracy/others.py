"""How much of the machine other processes used while something was measured: Linux's own count of processor time."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

PROC = Path("/proc")
IDLE = (3, 4)
"""Columns of ``/proc/stat`` in which nobody runs: idle, and waiting for a disk."""


class Others:
    """From its creation on: the share of all cores' time that went to processes not started from this one.

    What Ray's own daemons do counts as ours, for they are children of the driver that started them.
    """

    def __init__(self) -> None:
        self._busy, self._all = _machine()
        self._own = _own()

    def share(self) -> float:
        """0 on a quiet machine; also what a hypervisor says it gave to its other guests."""
        busy, all_ = _machine()
        if all_ == self._all:
            return 0.0
        return max(0.0, busy - self._busy - (_own() - self._own)) / (all_ - self._all)


def _machine() -> tuple[int, int]:
    """Ticks since boot in which some process ran, and ticks of all cores."""
    first = (PROC / "stat").read_text().split("\n", 1)[0]
    ticks = [int(word) for word in first.split()[1:9]]  # guests' time is part of user's
    return sum(t for k, t in enumerate(ticks) if k not in IDLE), sum(ticks)


def _own() -> int:
    """Ticks of this process and all that descend from it, the ended ones' included once they were waited for."""
    children: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # ended meanwhile
            continue
        children[int(fields[1])].append(int(folder.name))
        ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    result, waiting = 0, [os.getpid()]
    while waiting:
        one = waiting.pop()
        result += ticks.get(one, 0)
        waiting += children[one]
    return result
