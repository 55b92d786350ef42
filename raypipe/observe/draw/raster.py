"""Rasterise a timeline to character cells: which span covers each column of each device's row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from raypipe.schedule.kinds import NETWORK
from raypipe.simulate.timeline import Span, Timeline


def column_time(timelines: Sequence[Timeline], width: int, zoom: int = 1) -> float:
    """Return the time of one column, so that the longest of ``timelines`` takes at most ``width`` columns.

    If all times are multiples of a step that fits, a column is that step, or a fraction of it with up to ``zoom``
    columns per step; otherwise it is an equal share of the longest timeline.
    """
    width = max(width, 1)
    end = max((t.makespan for t in timelines), default=0.0)
    step = _common_step(timelines, end, width)
    if step is None:
        return end / width
    return step / max(1, min(zoom, int(width / round(end / step))))


def raster(timeline: Timeline, column: float) -> list[list[Span | None]]:
    """Return ``[device][column]``: the span at the column's centre, or None where the device idles.

    A span shorter than a column may be hidden. Where an all-reduce overlaps compute, the compute task is shown.
    """
    columns = math.ceil(timeline.makespan / column - 1e-6) if column else 0
    rows: list[list[Span | None]] = []
    for spans in timeline.spans:
        row: list[Span | None] = [None] * columns
        for span in spans:
            if span.end <= span.start:
                continue
            first = math.ceil(span.start / column - 0.5 - 1e-6)
            last = math.ceil(span.end / column - 0.5 - 1e-6)
            for c in range(max(first, 0), min(last, columns)):
                covering = row[c]
                if covering is None or covering.task.kind in NETWORK or span.task.kind not in NETWORK:
                    row[c] = span
        rows.append(row)
    return rows


def _common_step(timelines: Sequence[Timeline], end: float, width: int) -> float | None:
    """The greatest common divisor of all times; None if there is none or it needs more than ``width`` columns."""
    total = _exact(end)
    if not total:
        return None
    step = total
    for timeline in timelines:
        for spans in timeline.spans:
            for span in spans:
                for time in (span.start, span.end):
                    found = _exact(time)
                    if found is None:
                        return None
                    step = _gcd(step, found)
                    if total / step > width:
                        return None
    return float(step)


def _exact(time: float) -> Fraction | None:
    found = Fraction(time).limit_denominator(1000)
    return found if abs(float(found) - time) <= 1e-9 * max(1.0, abs(time)) else None


def _gcd(a: Fraction, b: Fraction) -> Fraction:
    return Fraction(math.gcd(a.numerator * b.denominator, b.numerator * a.denominator), a.denominator * b.denominator)
