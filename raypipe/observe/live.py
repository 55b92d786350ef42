"""Live activations over time: the curve behind the memory plot and the trace's counters."""

from __future__ import annotations

from raypipe.schedule.memory import births, deaths, recomputed
from raypipe.simulate.timeline import Timeline

Curve = list[tuple[float, float]]
"""(time, activations alive from then on), by time; a step function that starts at 0."""


def live_activations(timeline: Timeline) -> list[Curve]:
    """Per device, activations alive over time, in units of one stage's for a full micro-batch.

    The curve's highest point is the device's ``peak_activations``. Where one task ends as the next starts, the end
    comes first, so that no peak appears that the device never has.
    """
    again = recomputed(timeline.schedule)
    size = float(timeline.schedule.size)
    curves: list[Curve] = []
    for spans in timeline.spans:
        alive = 0
        curve: Curve = [(0.0, 0.0)]
        for task, start, end in spans:
            for time, change in ((start, births(task, again)), (end, -deaths(task))):
                if change:
                    alive += change
                    curve.append((time, alive * size))
        curves.append(curve)
    return curves
