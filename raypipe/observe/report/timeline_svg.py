"""A step as SVG: a lane per device, a box per task that explains itself under the pointer.

Places are percentages, so that the picture can be widened (zoomed into) without scaling its text.
"""

from __future__ import annotations

from typing import Any

from raypipe.errors import RaypipeError
from raypipe.observe.draw.palette import RGB, fill, ink
from raypipe.observe.report.markup import Markup, tag
from raypipe.schedule.forms.text import parse_task
from raypipe.schedule.ir import Task
from raypipe.schedule.kinds import NETWORK, TRAITS

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
