"""Activations alive on each device as time passes: what a memory plot draws."""

from __future__ import annotations

from raypipe.schedule.live_activations import births, deaths, recomputed_pairs
from raypipe.simulate.timeline import Timeline


def live_activations(timeline: Timeline) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Per device, (time, activations alive from then on), in units of one stage's full micro-batch.

    Starts at (0, 0); one entry per moment of change. Its highest value is ``Timeline.peak_activations`` where tasks
    take time.
    """
    schedule = timeline.schedule
    again = recomputed_pairs(schedule)
    size = float(schedule.size)
    rows = []
    for row in timeline.spans:
        changes: list[tuple[float, int]] = []
        for task, start, end in row:
            if born := births(task, again):
                changes.append((start, born))
            if dead := deaths(task, schedule.backwards):
                changes.append((end, -dead))
        curve = [(0.0, 0.0)]
        alive = 0
        for time, change in sorted(changes):  # at equal times the deaths come first
            alive += change
            if curve[-1][0] == time:
                curve[-1] = (time, alive * size)
            else:
                curve.append((time, alive * size))
        rows.append(tuple(curve))
    return tuple(rows)
