"""The caption of a drawing: its figures in one line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from raypipe.simulate.timeline import Timeline


def caption(timeline: Timeline) -> str:
    """Return a line with name, makespan, bubble ratio and peak activations per device."""
    return (
        f"{timeline.schedule.name}: makespan {timeline.makespan:.6g}, bubble {100 * timeline.bubble_ratio:.1f} %, "
        f"peak activations {folded(timeline.peak_activations)}"
    )


def folded(values: Sequence[float]) -> str:
    """Join the values; runs of three or more equal values are folded, and the middle of a long list is left out.

    >>> folded([4, 3, 2, 1]), folded([16, 16, 16, 8])
    ('4 3 2 1', '16 (x3) 8')
    """
    words = []
    for value, same in groupby(values):
        times = len(list(same))
        words += [f"{value:g} (x{times})"] if times > 2 else [f"{value:g}"] * times
    if len(words) > 12:
        words = [*words[:4], "...", *words[-4:]]
    return " ".join(words)
