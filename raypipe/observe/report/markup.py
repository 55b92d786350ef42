"""HTML that is safe by construction, as text is escaped unless it was made here; and pictures of it.

Curves over steps fill the width of the page. A step has a lane per device and a box per task that explains itself under
the pointer; its places are percentages, so that the picture can be widened (zoomed into) without scaling its text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from raypipe.errors import RaypipeError
from raypipe.observe.draw.palette import RGB, fill, ink
from raypipe.schedule.forms.text import parse_task
from raypipe.schedule.ir import Task
from raypipe.schedule.kinds import NETWORK, TRAITS

Child = object
"""Markup is taken as it is; None is left out; anything else is text, and escaped."""

VOID = {"br", "input", "meta"}


class Markup(str):
    """Finished HTML or SVG; every other string is text."""

    __slots__ = ()


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """Return an element.

    Args:
        name: the element's name; elements of ``VOID`` have no end tag.
        children: its content.
        attributes: names may end in ``_`` and use ``_`` for ``-``; those that are None are left out.

    >>> tag("p", "1 < 2", tag("br"), class_="a")
    '<p class="a">1 &lt; 2<br></p>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_text(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>" if name in VOID else f"<{name}{given}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Markup:
    """Return the children one after another."""
    return Markup("".join(c if isinstance(c, Markup) else escape(_text(c)) for c in children if c is not None))


def table(head: list[str], rows: list[list[Child]], class_: str | None = None) -> Markup:
    """Return a table that scrolls by itself on narrow screens."""
    titles = tag("tr", *(tag("th", cell) for cell in head))
    body = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    return tag("div", tag("table", tag("thead", titles), tag("tbody", *body), class_=class_), class_="wide")


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


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


LANE, BOX, STRIP = 26, 22, 5
"""Heights in pixels: of a device's lane, of a task, and of a collective, which overlaps compute."""
LABEL_FROM = 1.6
"""Boxes of so many percent of the width have room for their label."""

Lanes = list[list[tuple[Task, float, float]]]
"""Per device: task, start and end in seconds."""


def lanes_of(step: Any) -> Lanes | None:
    """Read ``predicted`` or ``measured`` of timeline.json; None if it is missing or damaged."""
    try:
        return [[(parse_task(s["task"]), float(s["start"]), float(s["end"])) for s in lane] for lane in step["spans"]]
    except (KeyError, TypeError, ValueError, RaypipeError):
        return None


def timeline_svg(lanes: Lanes, end_s: float, title: str) -> Markup:
    """Draw a step; ``end_s`` is the time at the right edge, the same for steps that are drawn above one another."""
    tasks = [task for lane in lanes for task, _, _ in lane]
    microbatches = 1 + max((mb for task in tasks for mb in task.mbs), default=0)
    stages = 1 + max((task.stage for task in tasks), default=0)
    end_s = end_s or 1.0
    shapes: list[Markup] = []
    for device, lane in enumerate(lanes):
        top = device * LANE
        shapes.append(tag("rect", x="0", y=top + 2, width="100%", height=BOX, class_="idle"))
        for task, start, end in sorted(lane, key=lambda span: span[0].kind in NETWORK):  # collectives are drawn last
            shapes.append(_box(task, start, end, end_s, top, fill(task, microbatches, stages), device))
    height = len(lanes) * LANE
    names = [tag("div", f"device {d}", style=f"height:{LANE}px") for d in range(len(lanes))]
    picture = tag("svg", *shapes, height=height, width="100%", role="img", aria_label=title)
    return tag(
        "div",
        tag("div", *names, class_="names"),
        tag("div", tag("div", picture, class_="zoomed"), class_="scroll"),
        class_="lanes",
    )


def _box(task: Task, start: float, end: float, end_s: float, top: int, colour: RGB, device: int) -> Markup:
    left, width = 100 * start / end_s, 100 * (end - start) / end_s
    of_network = task.kind in NETWORK
    y, height = (top + 2 + BOX - STRIP, STRIP) if of_network else (top + 2, BOX)
    number = ",".join(map(str, task.mbs))
    what = f"{task}: {TRAITS[task.kind].what}, stage {task.stage}"
    what += f", micro-batch {number}" if number else ""
    what += f", replica {task.replica}" if task.replica else ""
    what += f"; device {device}, {1e3 * start:.4g} to {1e3 * end:.4g} ms ({1e3 * (end - start):.4g} ms)"
    rgb = "#" + "".join(f"{round(255 * channel):02x}" for channel in colour)
    box = tag("rect", x=f"{left:.4f}%", y=y, width=f"{width:.4f}%", height=height, fill=rgb, class_="task")
    label = None
    if number and not of_network and width >= LABEL_FROM * max(len(number), 1):
        label = tag("text", number, x=f"{left + width / 2:.4f}%", y=top + 2 + BOX / 2, fill=ink(task.kind))
    return tag("g", tag("title", what), box, label)


def legend(lanes: Lanes) -> Markup:
    """Return the kinds of task that are drawn, in words."""
    kinds = sorted({task.kind for lane in lanes for task, _, _ in lane}, key=list(TRAITS).index)
    words = ", ".join(f"{kind} {TRAITS[kind].what}" for kind in kinds)
    return tag("p", f"Hue and number show the micro-batch, lightness the kind of task: {words}.", class_="note")
