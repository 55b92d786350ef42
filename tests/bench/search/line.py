"""What a case of the search's bench is given, and what it says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Effort:
    """How much of a case is run; every case has its own default."""

    count: int
    """Instances, cases or models."""
    seconds: float
    """Processor time of one search, or time of one proof; 0 where a case gives its searches the default."""
    first: int = 0
    """Seed of the first instance; the others follow."""
    emulate: int = 0
    """Instances that run on emulated devices too, where a case can."""
    plans: Path | None = None
    """Folder that a case keeps its plans in, for another that runs them."""


class Line(NamedTuple):
    """One line of a case's report and, where it has one, the limit that it is held against."""

    text: str
    value: float = 0.0
    most: float = 0.0
    """The value fails above this."""

    @property
    def fails(self) -> bool:
        return self.value > self.most + 1e-9 * abs(self.most)
