"""Curves over steps as SVG that fills the width of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raypipe.observe.report.markup import Markup, joined, tag

Points = Sequence[tuple[float, float | None]]
"""Step and value; None or a number that is not finite interrupts the curve."""
HEIGHT = 180
DOTS = 60
"""Curves of up to so many points show each point."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve of a chart."""

    name: str
    points: Points
    style: str
    """CSS class: ``first``, ``second`` or ``level``."""


def chart(title: str, curves: Sequence[Curve], unit: str = "") -> Markup:
    """Draw curves over one axis of steps; every point says its value under the pointer."""
    found = [(x, y) for curve in curves for x, y in curve.points if _drawn(y) and y is not None]
    if not found:
        return tag("p", f"{title}: no steps yet.", class_="note")
    low_x, high_x = min(x for x, _ in found), max(x for x, _ in found)
    low, high = min(y for _, y in found), max(y for _, y in found)
    room = 0.05 * (high - low) or abs(high) or 1.0
    low, high = low - room, high + room

    def place(x: float, y: float) -> tuple[float, float]:
        across = 50.0 if high_x == low_x else 100 * (x - low_x) / (high_x - low_x)
        return across, 100 * (high - y) / (high - low)

    shapes = [_lines(curve, place) for curve in curves]
    dots = [_dots(curve, place, unit) for curve in curves]
    lines = tag("svg", *shapes, viewBox="0 0 100 100", preserveAspectRatio="none", width="100%", height=HEIGHT)
    # A second picture on top: circles must not be stretched, so their places are percentages.
    plot = tag("svg", lines, *dots, width="100%", height=HEIGHT, role="img", aria_label=title, class_="plot")
    scale = tag("div", tag("span", f"{high:.4g}{unit}"), tag("span", f"{low:.4g}{unit}"), class_="scale")
    steps = tag("div", tag("span", f"step {low_x:g}"), tag("span", f"{high_x:g}"), class_="steps")
    names = joined(*(tag("span", curve.name, class_=f"key {curve.style}") for curve in curves))
    head = tag("figcaption", tag("b", title), " ", names)
    return tag("figure", head, tag("div", scale, tag("div", plot, steps, class_="grow"), class_="axes"))


def _drawn(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _lines(curve: Curve, place: Callable[[float, float], tuple[float, float]]) -> Markup:
    pieces: list[list[str]] = [[]]
    for x, y in curve.points:
        if y is None or not _drawn(y):
            pieces.append([])
        else:
            pieces[-1].append("{:.3f},{:.3f}".format(*place(x, y)))
    return joined(*(tag("polyline", points=" ".join(piece), class_=curve.style) for piece in pieces if piece))


def _dots(curve: Curve, place: Callable[[float, float], tuple[float, float]], unit: str) -> Markup:
    points = [(x, y) for x, y in curve.points if y is not None and _drawn(y)]
    if len(points) > DOTS:  # too close to point at: every so many, and the last one
        every = math.ceil(len(points) / DOTS)
        points = [*points[:-1:every], points[-1]]
    made = []
    for x, y in points:
        across, down = place(x, y)
        title = tag("title", f"{curve.name}, step {x:g}: {y:.6g}{unit}")
        made.append(tag("circle", title, cx=f"{across:.3f}%", cy=f"{down:.3f}%", r="3", class_=curve.style))
    return joined(*made)
