"""Parts of HTML pages of one file, without scripts or network: steps drawn as lanes, curves, tables.

The templates beside this file (``parts.html``, ``page.html``) escape every text. Curves fill the width of the page. A
step has a lane per device and a box per task that explains itself under the pointer; its places are percentages, so
that the picture can be widened (zoomed into) without scaling its text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from raypipe import __version__
from raypipe.observe.palette import fill, ink
from raypipe.observe.timelines import Lanes
from raypipe.schedule.kinds import NETWORK, TRAITS

DRAWN_TASKS = 20_000
DOTS = 60
"""Curves of up to so many points show each point."""
LABEL_FROM = 1.6
"""Boxes of so many percent of the width have room for a character of their label."""
Points = Sequence[tuple[float, float | None]]
"""Place on the axis and value; None or a number that is not finite interrupts the curve."""


def page(template: str, **values: Any) -> str:
    """Return a page from its template."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.get_template(template).render(version=__version__, **values)


def drawn_steps(lanes: Mapping[str, Lanes], facts: Mapping[str, str]) -> dict[str, Any] | None:
    """Return steps by name over one time axis, with the kinds of their tasks; None if there are too many tasks."""
    spans = [span for own in lanes.values() for lane in own for span in lane]
    if len(spans) > DRAWN_TASKS:
        return None
    end_s = max((end for _, _, end in spans), default=0.0) or 1.0
    kinds = sorted({task.kind for task, _, _ in spans}, key=list(TRAITS).index)
    return {
        "steps": [
            {"name": name, "facts": facts[name], "lanes": list(_boxes(own, end_s))} for name, own in lanes.items()
        ],
        "kinds": ", ".join(f"{kind} {TRAITS[kind].what}" for kind in kinds),
    }


def _boxes(lanes: Lanes, end_s: float) -> Iterator[list[dict[str, Any]]]:
    """Yield the boxes of each device; ``end_s`` is the time at the right edge."""
    tasks = [task for lane in lanes for task, _, _ in lane]
    microbatches = 1 + max((mb for task in tasks for mb in task.mbs), default=0)
    stages = 1 + max((task.stage for task in tasks), default=0)
    for device, lane in enumerate(lanes):
        boxes = []
        for task, start, end in sorted(lane, key=lambda span: span[0].kind in NETWORK):  # collectives are drawn last
            left, width, number = 100 * start / end_s, 100 * (end - start) / end_s, ",".join(map(str, task.mbs))
            what = f"{task}: {TRAITS[task.kind].what}, stage {task.stage}"
            what += f", micro-batch {number}" * bool(number) + f", replica {task.replica}" * bool(task.replica)
            what += f"; device {device}, {1e3 * start:.4g} to {1e3 * end:.4g} ms ({1e3 * (end - start):.4g} ms)"
            strip = task.kind in NETWORK
            box = {"left": f"{left:.4f}", "width": f"{width:.4f}", "middle": f"{left + width / 2:.4f}"}
            colour = "".join(f"{round(255 * channel):02x}" for channel in fill(task, microbatches, stages))
            label = number if not strip and width >= LABEL_FROM * max(len(number), 1) else ""
            boxes.append(
                box | {"title": what, "strip": strip, "fill": f"#{colour}", "label": label, "ink": ink(task.kind)}
            )
        yield boxes


def chart(title: str, unit: str, *curves: tuple[str, str, Points], axis: str = "step") -> dict[str, Any]:
    """Return curves (name, style, points) over one axis; every point says its value under the pointer."""
    known = [(x, y) for _, _, points in curves for x, y in points if y is not None and math.isfinite(y)]
    if not known:
        return {"title": title, "curves": []}
    first, last = min(x for x, _ in known), max(x for x, _ in known)
    low, high = min(y for _, y in known), max(y for _, y in known)
    room = 0.05 * (high - low) or abs(high) or 1.0
    low, high = (low - room if low < 0 else max(low - room, 0.0)), high + room

    def place(x: float, y: float) -> tuple[str, str]:
        across = 50.0 if last == first else 100 * (x - first) / (last - first)
        return f"{across:.3f}", f"{100 * (high - y) / (high - low):.3f}"

    made = []
    for name, style, points in curves:
        pieces = groupby(points, key=lambda point: point[1] is not None and math.isfinite(point[1]))
        lines = [[(x, y) for x, y in piece if y is not None] for drawn, piece in pieces if drawn]
        dots = [point for line in lines for point in line]
        if len(dots) > DOTS:  # too close to point at: every so many, and the last one
            dots = [*dots[: -1 : math.ceil(len(dots) / DOTS)], dots[-1]]
        made.append(
            {
                "name": name,
                "style": style,
                "lines": [" ".join(",".join(place(x, y)) for x, y in line) for line in lines],
                "dots": [(*place(x, y), f"{name}, {axis} {x:g}: {y:.6g}{unit}") for x, y in dots],
            }
        )
    ends = {"high": f"{high:.4g}{unit}", "low": f"{low:.4g}{unit}", "first": f"{first:g}", "last": f"{last:g}"}
    return {"title": title, "curves": made, "axis": axis, **ends}
