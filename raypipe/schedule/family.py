"""Family: a named generator, what it is, and which options of a Shape it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.shape import NEUTRAL, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A named schedule: how to make it and one line about it."""

    make: Callable[[Shape, CostTable], Schedule]
    about: str
    options: frozenset[str] = frozenset()
    """Fields of a Shape it reads besides devices and microbatches."""
    fixed_chunks: int | None = None
    """Stages per device where the placement decides it (ZB-V: 2)."""
    placement: Callable[[Shape], tuple[int, ...]] | None = None
    """Device of each stage, for families that search for their orders, so that nobody has to wait for an order to learn
    where stages are; such a family exists for every number of devices and chunks."""
    fills: bool = False
    """Every device runs all forwards of a unit (without units: of the step) before its first weight gradient, in
    an order made for even costs; so it holds all their activations at one moment."""

    def stages(self, shape: Shape) -> int:
        """Stages of one replica: devices times chunks."""
        return shape.devices * (self.fixed_chunks or shape.chunks)

    def check(self, name: str, shape: Shape) -> None:
        """Refuse an option that this family would have to ignore.

        Raises:
            ScheduleError: naming the option.
        """
        for option, neutral in NEUTRAL.items():
            value = getattr(shape, option)
            if option in self.options or value == neutral:
                continue
            if option == "chunks" and value == self.fixed_chunks:
                continue
            if option == "memory_limit":  # any schedule can be held against a limit; see generate
                continue
            raise ScheduleError(option, f"{name} has no use for {option} = {value}", f"leave {option} out")
