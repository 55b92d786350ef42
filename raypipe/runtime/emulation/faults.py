"""Faults of emulated devices, to see whether what explains a run finds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFaults:
    """The faults of one emulated device; times in seconds."""

    slow: tuple[tuple[int, int, float], ...] = ()
    """(first step, end, factor): in these steps, counted from 0, its tasks take so many times as long."""
    data_s: float = 0.0
    """In the first forward of each step: the samples come late."""
    host_s: float = 0.0
    """Before each task of a micro-batch: the host starts it late."""
    between_steps_s: float = 0.0
    """Before each step: the driver is late."""
    norm_s: float = 0.0
    """Beyond a message's way, until the global gradient norm is known."""

    def slower(self, step: int) -> float:
        """Return the factor of a step's tasks."""
        factor = 1.0
        for first, end, one in self.slow:
            factor *= one if first <= step < end else 1.0
        return factor


NO_FAULTS = DeviceFaults()
