"""Parts of a step that can be mended: each cause of lost time, on all devices or on one."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

Cause = Literal["imbalance", "warm-up", "link", "sync", "gather", "recompute", "data", "norm", "straggler", "host"]
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
MENDABLE: Final[tuple[Cause, ...]] = tuple(c for c in CAUSES if c != "warm-up")
"""Causes that a replay can be without; warm-up is what then remains above the ideal step."""
MEANING: Final[dict[Cause, str]] = {
    "imbalance": "the cut gives some devices more work than others",
    "warm-up": "devices wait for the first micro-batches and after the last, and where the order has holes",
    "link": "messages between stages are under way while their receiver has nothing to do",
    "sync": "gradient sums (all-reduces, reduce-scatters) that compute does not hide",
    "gather": "gathers of sharded weights that compute does not hide",
    "recompute": "forwards that are computed twice to save memory",
    "data": "the samples came late",
    "norm": "updates wait for the global gradient norm",
    "straggler": "a device takes longer than its twins, its own usual time or its profile",
    "host": "the host starts tasks late: dispatch, Python, and what else is between tasks and steps",
}


class Mend(NamedTuple):
    """One cause taken out of a step."""

    cause: Cause
    where: int | tuple[int, int] | None = None
    """On one device, or of ``link`` between one pair (sender, receiver); None: everywhere."""
