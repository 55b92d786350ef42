"""What a device measures of its memory in a step."""

from __future__ import annotations

from typing import NamedTuple


class StepMemory(NamedTuple):
    """In bytes; nothing where nobody asked for it, since it slows steps down on CPUs."""

    peak: int
    """Allocated at its fullest moment."""
    recomputed: dict[int, int]
    """Per stage with an R, what one micro-batch's R left allocated."""
