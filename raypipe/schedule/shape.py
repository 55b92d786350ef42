"""Shape: the few numbers from which a generator makes a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from raypipe.errors import ScheduleError, nearest

Concat = Literal["direct", "doubling", "halving"]
MOST = 10_000_000
"""Stages times micro-batches: what is above would fill the memory of any machine, and is a typing error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Devices, micro-batches and a family's own options. What a family cannot use must keep its default."""

    devices: int
    """Devices of one pipeline, D."""
    microbatches: int
    """Full micro-batches of a step, N, over all replicas of the family's own (not data-parallel copies)."""
    chunks: int = 1
    """Stages per device, V."""
    unit: int | None = None
    """Micro-batches of a scheduling unit, U (ZeroPP); none: all of them."""
    pipelines: int = 2
    """Pipelines of a bidirectional schedule, 2f: f down and f up (Chimera)."""
    concat: Concat = "direct"
    """How basic units follow one another (Chimera section 3.3)."""
    memory_limit: float | None = None
    """Activations a device may hold at once, in units of one stage's for one micro-batch."""

    def __post_init__(self) -> None:
        for name in ("devices", "microbatches", "chunks"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ScheduleError(name, f"{value!r} is not a count", "use a whole number >= 1")
        if (size := self.devices * self.chunks * self.microbatches) > MOST:
            name = max(("devices", "microbatches", "chunks"), key=lambda n: int(getattr(self, n)))
            raise ScheduleError(
                name, f"{size} times a micro-batch on a stage, a step of more than {MOST}", "use smaller numbers"
            )
        if self.unit is not None and not 1 <= self.unit <= self.microbatches:
            raise ScheduleError(
                "unit", f"{self.unit} micro-batches a unit, {self.microbatches} in all",
                f"use 1 to {self.microbatches}",
            )  # fmt: skip
        if self.pipelines < 2 or self.pipelines % 2:
            raise ScheduleError("pipelines", f"{self.pipelines} is not 2f", "use an even number >= 2")
        if self.concat not in get_args(Concat):
            raise ScheduleError("concat", f'"{self.concat}" is unknown', nearest(str(self.concat), get_args(Concat)))
        if self.memory_limit is not None and not 0 < self.memory_limit < float("inf"):
            fix = "use a finite number above 0; leave it out for no limit"
            raise ScheduleError("memory_limit", f"{self.memory_limit} activations", fix)
