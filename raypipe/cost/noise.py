"""Estimates of how much a measurement was disturbed, made from the measurement itself."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raypipe.job.field_types import Spec

LIMIT = 0.1
"""Disturbances above this share cause a warning, because plans differ by less."""


class Noise(Spec):
    """How wrong the times of a profile may be. On a quiet machine each figure is a few hundredths."""

    stolen: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the measured tasks' time in which other processes had the cores, so that the tasks' threads did not
    run. It is the largest over micro-batch sizes and devices, and 0 on GPUs."""
    drift: Annotated[float, Field(ge=0)] = 0.0
    """Relative difference between the times of the same tasks at the end of the measurement and before."""
    again: Annotated[int, Field(ge=0)] = 0
    """Number of micro-batch sizes that were measured again because of noise."""

    @property
    def worst(self) -> float:
        """The larger of the two shares."""
        return max(self.stolen, self.drift)

    def warning(self) -> str | None:
        """Return a warning to print, or None if the noise is within ``LIMIT``.

        >>> print(Noise(stolen=0.46, drift=0.02).warning())
        warning: the measured times may be wrong: other processes had the cores for 46% of the time; measure again on \
a quiet machine
        """
        if self.worst <= LIMIT:
            return None
        return f"warning: the measured times may be wrong: {self.cause()}; measure again on a quiet machine"

    def cause(self) -> str:
        """Return the larger disturbance as a sentence.

        >>> Noise(stolen=0.1, drift=0.2).cause()
        'the same tasks took 20% more or less time at the end'
        """
        if self.stolen >= self.drift:
            return f"other processes had the cores for {self.stolen:.0%} of the time"
        return f"the same tasks took {self.drift:.0%} more or less time at the end"

    def sentence(self) -> str:
        """Return all figures as a sentence, for the notes of a table."""
        return (
            f"other processes had the cores for {self.stolen:.1%} of the time, the same tasks took {self.drift:.1%} "
            f"more or less at the end; {self.again} sizes measured again"
        )
