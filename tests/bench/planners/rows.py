"""A case's row: what every system chose, how long a step takes with it, and its regret."""

from __future__ import annotations

import time
from statistics import median
from typing import TypedDict

from tests.bench.planners.cases import Case
from tests.bench.planners.systems import SYSTEMS


class Outcome(TypedDict):
    words: str
    seconds: float
    predicted_s: float | None
    """What the system itself says, where it does."""
    memory_bytes: float
    fits: bool
    regret: float | None
    """None where it does not fit."""


class Row(TypedDict):
    case: str
    planned_s: float
    """What raypipe took to plan."""
    best_s: float
    systems: dict[str, Outcome | None]
    """None where a system finds no plan."""


def row_of(case: Case) -> Row:
    """All systems on one case."""
    result = {name: system(case) for name, system in SYSTEMS.items() if name != "raypipe"}
    began = time.monotonic()
    result["raypipe"] = SYSTEMS["raypipe"](case)
    spent = time.monotonic() - began
    best = min((v.seconds for v in result.values() if v is not None and v.fits), default=float("nan"))
    return {
        "case": case.name, "planned_s": spent, "best_s": best,
        "systems": {
            name: None if v is None else Outcome(
                words=v.choice.words, seconds=v.seconds, predicted_s=v.choice.predicted_s, memory_bytes=v.fullest,
                fits=v.fits, regret=v.seconds / best - 1 if v.fits else None,
            )
            for name, v in result.items()
        },
    }  # fmt: skip


def summary(rows: list[Row]) -> list[str]:
    """Per system: how often it is best, median, worst, and how often it has nothing that fits."""
    lines = []
    for name in SYSTEMS:
        own = [row["systems"][name] for row in rows]
        regrets = [o["regret"] for o in own if o is not None and o["regret"] is not None]
        if regrets:
            lines.append(
                f"{name:12} within 0.1 % of the best {sum(r <= 1e-3 for r in regrets):3} of {len(rows)}   "
                f"median regret {median(regrets):7.1%}   worst {max(regrets):7.1%}   "
                f"nothing that fits {len(rows) - len(regrets)}"
            )
    return lines


def shown(row: Row) -> str:
    """One line: the best time, and each system's regret."""
    cells = [f"{row['case']:46} {row['best_s']:8.3f} s"]
    for name in SYSTEMS:
        o = row["systems"][name]
        what = "none" if o is None else "too large" if o["regret"] is None else f"{o['regret']:.1%}"
        cells.append(f"{what:>11}")
    return " ".join(cells)
