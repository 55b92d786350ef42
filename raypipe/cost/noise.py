"""What disturbed a measurement, as far as the measurement itself can tell."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raypipe.job.field_types import Spec

LIMIT = 0.1
"""A larger disturbance is worth a warning: plans are told apart by less."""


class Noise(Spec):
    """By how much the times of a profile may be wrong. A quiet machine leaves a few hundredths of each."""

    stolen: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the measured tasks' time in which their threads did not run: other processes had the core. The largest
    over micro-batch sizes and devices; 0 on GPUs."""
    drift: Annotated[float, Field(ge=0)] = 0.0
    """Relative difference between the same tasks at the end and before."""
    again: Annotated[int, Field(ge=0)] = 0
    """Micro-batch sizes that were measured again for it."""

    @property
    def worst(self) -> float:
        """The one figure."""
        return max(self.stolen, self.drift)

    def warning(self) -> str | None:
        """What to tell people; None where there is nothing to warn of.

        >>> print(Noise(stolen=0.46, drift=0.02).warning())
        warning: the measured times may be wrong, for other processes had the cores for 46% of the time; measure again \
on a quiet machine
        """
        if self.worst <= LIMIT:
            return None
        return f"warning: the measured times may be wrong, for {self.cause()}; measure again on a quiet machine"

    def cause(self) -> str:
        """What disturbed most.

        >>> Noise(stolen=0.1, drift=0.2).cause()
        'the same tasks took 20% more or less time at the end'
        """
        if self.stolen >= self.drift:
            return f"other processes had the cores for {self.stolen:.0%} of the time"
        return f"the same tasks took {self.drift:.0%} more or less time at the end"

    def sentence(self) -> str:
        """All of it, for a table's notes."""
        return (
            f"other processes had the cores for {self.stolen:.1%} of the time, the same tasks took {self.drift:.1%} "
            f"more or less at the end; {self.again} sizes measured again"
        )
