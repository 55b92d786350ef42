"""Draw timelines as Gantt charts: one lane per device, time to the right, several schedules on one time axis.

Hue and number show the micro-batch, lightness the kind (palette.py), hatching the replica. If a device holds several
stages of a replica, a dark foot marks the later ones, the darker the later. With a single micro-batch, hue and number
show the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from raypipe.observe.draw.caption import folded
from raypipe.observe.draw.palette import colour, grey, ink
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import NETWORK, TRAITS, Kind
from raypipe.simulate.timeline import Span, Timeline, critical_path

HATCHES = ("", "////", "\\\\\\\\", "xxxx", "----", "||||", "++++", "//")
NAMES: dict[Kind, str] = {kind: f"{kind} {traits.what}" for kind, traits in TRAITS.items()}
MANY = 20_000
"""With more spans than this, boxes are drawn as an image inside the SVG."""
IDLE, OUTLINE = "#f3f3f3", "#d00000"
HEIGHT = 0.84
"""Height of a box, relative to its lane."""


def gantt(
    timelines: Sequence[Timeline], width: float = 10.0, time_label: str = "time", critical: bool = False
) -> Figure:
    """Draw one chart per timeline, stacked over one time axis.

    Args:
        timelines: predicted, emulated or measured steps.
        width: width of the page, in inches; the height follows from the number of devices.
        time_label: label of the time axis.
        critical: whether to outline the tasks of each critical path.
    """
    lanes = [max(len(t.spans), 1) for t in timelines]
    lane = min(0.28, 9.0 / max(lanes, default=1))
    heights = [lane * n for n in lanes]
    gap, foot, head = 0.38, 0.66, 0.32
    height = head + sum(heights) + gap * (len(lanes) - 1) + foot
    figure = Figure(figsize=(width, height))
    left, right = 0.8 / width, 1 - 0.15 / width
    end = max((t.makespan for t in timelines), default=0.0) or 1.0
    top = height - head
    for n, (timeline, tall) in enumerate(zip(timelines, heights, strict=True)):
        axes = figure.add_axes((left, (top - tall) / height, right - left, tall / height))
        top -= tall + gap
        axes.set_xlim(0, end)
        draw_lanes(axes, timeline, points=72 * width * (right - left) / end, lane_points=72 * lane)
        if critical:
            _outline(axes, timeline)
        if n < len(timelines) - 1:
            axes.tick_params(labelbottom=False)
        else:
            axes.set_xlabel(time_label, fontsize=8, labelpad=1)
    _legend(figure, timelines, 0.02 / height, critical)
    return figure


def draw_lanes(axes: Any, timeline: Timeline, points: float, lane_points: float = 20.0) -> None:
    """Draw one timeline into Matplotlib ``axes``; ``points`` is the width of one unit of time, for the labels."""
    schedule = timeline.schedule
    boxes: dict[tuple[bool, int], list[tuple[int, Span]]] = {}  # collectives are drawn last, so nothing covers them
    for device, spans in enumerate(timeline.spans):
        for span in spans:
            boxes.setdefault((span.task.kind in NETWORK, span.task.replica), []).append((device, span))
    total = sum(map(len, boxes.values()))
    for (_, replica), members in sorted(boxes.items(), key=lambda item: item[0]):
        axes.add_collection(
            PolyCollection(
                [_corners(device, span) for device, span in members],
                facecolors=[colour(span.task, schedule) for _, span in members],
                edgecolors=(1, 1, 1, 0.75),
                linewidths=0.5 if total < 2000 else 0.0,
                hatch=HATCHES[replica % len(HATCHES)],
                hatch_linewidth=0.6,
                rasterized=total > MANY,
            )
        )
    _feet(axes, schedule, boxes)
    if total <= 3000:
        _labels(axes, schedule, boxes, points, lane_points)
    devices = len(timeline.spans)
    axes.add_patch(Rectangle((0, -0.5), timeline.makespan, devices, facecolor=IDLE, zorder=0))
    axes.set_ylim(devices - 0.5, -0.5)
    step = max(1, devices // 32)
    axes.set_yticks(range(0, devices, step), [f"device {d}" for d in range(0, devices, step)], fontsize=7)
    axes.tick_params(axis="y", length=0, pad=3)
    axes.tick_params(axis="x", labelsize=7, length=2, color="#888888")
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_title(schedule.name, loc="left", fontsize=9, fontweight="bold", pad=4)
    axes.set_title(
        f"makespan {timeline.makespan:.5g} · bubble {100 * timeline.bubble_ratio:.1f} % · "
        f"activations {folded(timeline.peak_activations)}",
        loc="right",
        fontsize=8,
        pad=4,
    )


def _corners(device: int, span: Span) -> list[tuple[float, float]]:
    low, high = device - HEIGHT / 2, device + HEIGHT / 2
    if span.task.kind in NETWORK:  # overlaps compute, so it is a strip at the bottom of the lane
        low = device + HEIGHT / 2 - 0.2
    return [(span.start, low), (span.end, low), (span.end, high), (span.start, high)]


def _outline(axes: Any, timeline: Timeline) -> None:
    device = {task: d for d, order in enumerate(timeline.schedule.orders) for task in order}
    path = [_corners(device[span.task], span) for span in critical_path(timeline).spans]
    axes.add_collection(PolyCollection(path, facecolors="none", edgecolors=OUTLINE, linewidths=1.2))


def _chunks(schedule: Schedule) -> dict[tuple[int, int], int]:
    """(replica, stage) -> how many earlier stages of that replica its device holds; empty if no device holds two."""
    chunk: dict[tuple[int, int], int] = {}
    for replica, devices in enumerate(schedule.placement):
        latest: dict[int, int] = {}
        for stage, device in enumerate(devices):
            chunk[replica, stage] = latest[device] = latest.get(device, -1) + 1
    return chunk if any(chunk.values()) else {}


def _feet(axes: Any, schedule: Schedule, boxes: dict[tuple[bool, int], list[tuple[int, Span]]]) -> None:
    chunk = _chunks(schedule)
    most = max(chunk.values(), default=0)
    feet, colours = [], []
    for members in boxes.values():
        for device, span in members:
            later = chunk.get((span.task.replica, span.task.stage), 0)
            if later:
                bottom = device + HEIGHT / 2
                ends = span.start, span.end
                feet.append([(ends[0], bottom - 0.13), (ends[1], bottom - 0.13), (ends[1], bottom), (ends[0], bottom)])
                colours.append((0.1, 0.1, 0.1, 0.25 + 0.5 * later / most))
    if feet:
        axes.add_collection(PolyCollection(feet, facecolors=colours, linewidths=0, rasterized=len(feet) > MANY))


def _labels(
    axes: Any,
    schedule: Schedule,
    boxes: dict[tuple[bool, int], list[tuple[int, Span]]],
    points: float,
    lane_points: float,
) -> None:
    """Label boxes that have room with their micro-batch, or with their stage if there is only one micro-batch."""
    size = min(7.5, 0.5 * lane_points)
    if size < 3:
        return
    for members in boxes.values():
        for device, span in members:
            task = span.task
            text = str(task.stage) if schedule.microbatches == 1 and task.mbs else ",".join(map(str, task.mbs))
            if text and (span.end - span.start) * points >= 0.62 * size * len(text):
                axes.text(
                    (span.start + span.end) / 2,
                    device,
                    text,
                    fontsize=size,
                    color=ink(span.task.kind),
                    ha="center",
                    va="center_baseline",
                )


def _legend(figure: Figure, timelines: Sequence[Timeline], bottom: float, critical: bool) -> None:
    kinds = {span.task.kind for t in timelines for spans in t.spans for span in spans}
    replicas = max((t.schedule.replicas for t in timelines), default=1)
    entries = [Patch(facecolor=grey(k), edgecolor="white", label=name) for k, name in NAMES.items() if k in kinds]
    for r in range(1, min(replicas, len(HATCHES))):
        entries.append(Patch(facecolor="#d0d0d0", edgecolor="white", hatch=HATCHES[r], label=f"replica {r}"))
    if any(_chunks(t.schedule) for t in timelines):
        entries.append(Patch(facecolor="#606060", label="dark foot: later stage of the device"))
    if any(t.schedule.microbatches == 1 for t in timelines):
        entries.append(Patch(facecolor="none", label="one micro-batch: numbers are stages"))
    if critical:
        entries.append(Patch(facecolor="none", edgecolor=OUTLINE, linewidth=1.2, label="critical path"))
    entries.append(Patch(facecolor=IDLE, edgecolor="#cccccc", label="idle"))
    figure.legend(
        handles=entries,
        loc="lower center",
        bbox_to_anchor=(0.5, bottom),
        ncols=min(len(entries), 8),
        frameon=False,
        fontsize=7.5,
        handlelength=1.4,
        handleheight=1.0,
        columnspacing=1.6,
    )
