"""Draw timelines as Gantt charts: one lane per device, time to the right, several schedules on one time axis.

Hue and number show the micro-batch, lightness the kind (``palette``), hatching the replica. If a device holds several
stages of a replica, a dark foot marks the later ones, the darker the later. Of a pair, the forward is above. With a
single micro-batch, hue and number show the stage.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from raypipe.errors import RequestError
from raypipe.files import write_whole
from raypipe.observe.palette import colour, grey, ink, oklch
from raypipe.observe.terminal import folded
from raypipe.plan.hybrid import Comparison
from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import NETWORK, TRAITS, Kind
from raypipe.simulate.timeline import Span, Timeline, critical_path, live_activations

HATCHES = ("", "////", "\\\\\\\\", "xxxx", "----", "||||", "++++", "//")
NAMES: dict[Kind, str] = {kind: f"{kind} {traits.what}" for kind, traits in TRAITS.items()}
MANY = 20_000
"""With more spans than this, boxes are drawn as an image inside the SVG."""
IDLE, OUTLINE = "#f3f3f3", "#d00000"
HEIGHT = 0.84
"""Height of a box, relative to its lane."""


WIDTH = 10.0
"""Of a page with a lane per device, in inches; the height follows from the number of devices."""


def gantt(timelines: Sequence[Timeline], time_label: str = "time", critical: bool = False) -> Figure:
    """Draw one chart per timeline, stacked over one time axis.

    Args:
        timelines: predicted, emulated or measured steps.
        time_label: label of the time axis.
        critical: whether to outline the tasks of each critical path.
    """
    lanes = [max(len(t.spans), 1) for t in timelines]
    lane = min(0.28, 9.0 / max(lanes, default=1))
    heights = [lane * n for n in lanes]
    gap, foot, head = 0.38, 0.66, 0.32
    height = head + sum(heights) + gap * (len(lanes) - 1) + foot
    figure = Figure(figsize=(WIDTH, height))
    left, right = 0.8 / WIDTH, 1 - 0.15 / WIDTH
    end = max((t.makespan for t in timelines), default=0.0) or 1.0
    top = height - head
    for n, (timeline, tall) in enumerate(zip(timelines, heights, strict=True)):
        axes = figure.add_axes((left, (top - tall) / height, right - left, tall / height))
        top -= tall + gap
        axes.set_xlim(0, end)
        draw_lanes(axes, timeline, points=72 * WIDTH * (right - left) / end, lane_points=72 * lane)
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
    boxes: Boxes = {}  # collectives are drawn last, so nothing covers them
    pairs = schedule.pairs
    for device, spans in enumerate(timeline.spans):
        for span in spans:
            box = (*_sides(device, span.task, schedule, pairs), span)
            boxes.setdefault((span.task.kind in NETWORK, span.task.replica), []).append(box)
    total = sum(map(len, boxes.values()))
    for (_, replica), members in sorted(boxes.items(), key=lambda item: item[0]):
        axes.add_collection(
            PolyCollection(
                [_corners(*box) for box in members],
                facecolors=[colour(span.task, schedule) for _, _, span in members],
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


Boxes = dict[tuple[bool, int], list[tuple[float, float, Span]]]
"""(whether it is a collective, replica) -> upper side, lower side and span of each box."""


def _sides(device: int, task: Task, schedule: Schedule, pairs: Mapping[Task, Task]) -> tuple[float, float]:
    low, high = device - HEIGHT / 2, device + HEIGHT / 2
    if task.kind in NETWORK:  # overlaps compute, so it is a strip at the bottom of the lane
        return high - 0.2, high
    if task in pairs:
        return (device, high) if task in schedule.joined else (low, device)
    return low, high


def _corners(low: float, high: float, span: Span) -> list[tuple[float, float]]:
    return [(span.start, low), (span.end, low), (span.end, high), (span.start, high)]


def _outline(axes: Any, timeline: Timeline) -> None:
    device = {task: d for d, order in enumerate(timeline.schedule.orders) for task in order}
    schedule, pairs = timeline.schedule, timeline.schedule.pairs
    path = [
        _corners(*_sides(device[span.task], span.task, schedule, pairs), span) for span in critical_path(timeline).spans
    ]
    axes.add_collection(PolyCollection(path, facecolors="none", edgecolors=OUTLINE, linewidths=1.2))


def _chunks(schedule: Schedule) -> dict[tuple[int, int], int]:
    """(replica, stage) -> how many earlier stages of that replica its device holds; empty if no device holds two."""
    chunk: dict[tuple[int, int], int] = {}
    for replica, devices in enumerate(schedule.placement):
        latest: dict[int, int] = {}
        for stage, device in enumerate(devices):
            chunk[replica, stage] = latest[device] = latest.get(device, -1) + 1
    return chunk if any(chunk.values()) else {}


def _feet(axes: Any, schedule: Schedule, boxes: Boxes) -> None:
    chunk = _chunks(schedule)
    most = max(chunk.values(), default=0)
    feet, colours = [], []
    for members in boxes.values():
        for _, bottom, span in members:
            later = chunk.get((span.task.replica, span.task.stage), 0)
            if later:
                ends = span.start, span.end
                feet.append([(ends[0], bottom - 0.13), (ends[1], bottom - 0.13), (ends[1], bottom), (ends[0], bottom)])
                colours.append((0.1, 0.1, 0.1, 0.25 + 0.5 * later / most))
    if feet:
        axes.add_collection(PolyCollection(feet, facecolors=colours, linewidths=0, rasterized=len(feet) > MANY))


def _labels(
    axes: Any,
    schedule: Schedule,
    boxes: Boxes,
    points: float,
    lane_points: float,
) -> None:
    """Label boxes that have room with their micro-batch, or with their stage if there is only one micro-batch."""
    size = min(7.5, 0.5 * lane_points)
    if size < 3:
        return
    for members in boxes.values():
        for low, high, span in members:
            task = span.task
            text = str(task.stage) if schedule.microbatches == 1 and task.mbs else ",".join(map(str, task.mbs))
            if text and (span.end - span.start) * points >= 0.62 * size * len(text):
                axes.text(
                    (span.start + span.end) / 2,
                    (low + high) / 2,
                    text,
                    fontsize=size * (1 if high - low > HEIGHT / 2 else 0.7),
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


MOST_LANES = 16


def memory_plot(timelines: Sequence[Timeline]) -> Figure:
    """Plot the live activations of each timeline; all share one time axis.

    Devices of one timeline share a memory axis. Timelines do not, because the unit is one stage's activation and their
    stages may differ in size.
    """
    # If there are more devices than fit a page, show evenly spaced ones, including the first and the last.
    shown = [_choose(len(t.spans)) for t in timelines]
    curves = [live_activations(t) for t in timelines]
    end = max((t.makespan for t in timelines), default=0.0) or 1.0
    lane, gap, head, foot = 0.42, 0.38, 0.32, 0.42
    height = head + foot + gap * (len(timelines) - 1) + lane * sum(map(len, shown))
    figure = Figure(figsize=(WIDTH, height))
    left, right = 0.95 / WIDTH, 1 - 0.3 / WIDTH
    top = height - head
    for n, (timeline, devices) in enumerate(zip(timelines, shown, strict=True)):
        peaks = timeline.peak_activations
        highest = max(peaks, default=0.0) or 1.0
        for k, device in enumerate(devices):
            axes = figure.add_axes((left, (top - lane * (k + 1)) / height, right - left, 0.86 * lane / height))
            last = n == len(timelines) - 1 and k == len(devices) - 1
            turn = 250 + 300 * device / max(len(timeline.spans), 2)
            _memory_lane(axes, curves[n][device], timeline.makespan, f"device {device}", oklch(0.72, 0.12, turn), last)
            axes.set_xlim(0, end)
            axes.text(end, peaks[device], f" {peaks[device]:g}", fontsize=7, va="center")
            axes.set_ylim(0, highest * 1.15)
            if k == 0:
                axes.set_title(timeline.schedule.name, loc="left", fontsize=9, fontweight="bold", pad=4)
                axes.set_title(f"at most {highest:g} activations", loc="right", fontsize=8, pad=4)
            if last:
                axes.set_xlabel("time", fontsize=8, labelpad=1)
        top -= lane * len(devices) + gap
    return figure


def _choose(devices: int) -> list[int]:
    if devices <= MOST_LANES:
        return list(range(devices))
    return sorted({round(k * (devices - 1) / (MOST_LANES - 1)) for k in range(MOST_LANES)})


def _memory_lane(
    axes: Any, curve: Sequence[tuple[float, float]], makespan: float, name: str, fill: Any, last: bool
) -> None:
    times = [*(time for time, _ in curve), makespan]
    alive = [*(value for _, value in curve), curve[-1][1]]
    axes.fill_between(times, alive, step="post", color=fill, alpha=0.85, linewidth=0)
    axes.step(times, alive, where="post", color="#333333", linewidth=0.6)
    peak = max(alive)
    axes.axhline(peak, color="#999999", linewidth=0.5, linestyle=(0, (3, 3)))
    axes.set_yticks([0, peak] if peak else [0], [""] * (2 if peak else 1))
    axes.set_ylabel(name, rotation=0, fontsize=7, ha="right", va="center", labelpad=6)
    axes.tick_params(axis="both", labelsize=7, length=2, color="#888888", labelbottom=last)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#bbbbbb")


def hybrid_plot(found: Comparison, title: str) -> Figure:
    """One line per strategy over a logarithmic device axis; a dashed line marks the tipping point.

    Args:
        found: the rows to draw.
        title: above the axes.
    """
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    counts = [row.devices for row in found.rows]
    axes.plot(counts, counts, color="0.75", linestyle=":", label="linear")
    axes.plot(counts, [row.dp for row in found.rows], marker="o", color=oklch(0.55, 0.12, 250), label="data parallel")
    splits = sorted({split for row in found.rows for split in row.hybrid})
    for n, split in enumerate(splits):
        points = [(row.devices, su) for row in found.rows if (su := row.hybrid[split]) is not None]
        if points:
            colour = oklch(0.62, 0.15, 40 + 100 * n / max(len(splits), 1))
            axes.plot(*zip(*points, strict=True), marker="s", color=colour, label=f"hybrid, {split} devices a worker")
    if found.tipping_point is not None:
        axes.axvline(found.tipping_point, color="0.5", linestyle="--", linewidth=1)
        axes.annotate(
            f"tipping point: {found.tipping_point} devices",
            (found.tipping_point, 0.02),
            (4, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("devices")
    axes.set_ylabel("speed-up in time to accuracy over one device")
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


FORMATS = (".svg", ".png", ".pdf")


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` as SVG, PNG (200 dpi) or PDF, depending on the file's suffix.

    Raises:
        RequestError: the suffix is another one, or the file cannot be written.
    """
    check_format(path)
    # Text stays text (small, searchable files). No dates or random ids, so that equal pictures are equal files.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "raypipe", "font.family": "sans-serif"}
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})
    with matplotlib.rc_context(settings):
        content = io.BytesIO()
        figure.savefig(content, format=path.suffix[1:].lower(), dpi=200, metadata=metadata)
    data = content.getvalue()
    if path.suffix.lower() == ".svg":
        data = slim(data.decode()).encode()
    try:
        write_whole(path, data)
    except OSError as error:
        raise RequestError(str(path), error.strerror or str(error), "choose a place that can be written") from error


def slim(svg: str) -> str:
    """Shrink an SVG to about a third: no indentation, numbers to a hundredth of a point, shared styles as classes."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' clip-path="[^"]*"(?= style="fill)', "", svg)  # boxes never leave the axes
    svg = re.sub(r"font-family: [^;]*;", "font-family: 'DejaVu Sans', Arial, sans-serif;", svg)
    svg = re.sub(r' transform="rotate\(-?0 [^)]*\)"', "", svg)
    svg = re.sub(r"(?<![\w#])(-?\d+\.\d{2})\d+", r"\1", svg)
    svg = re.sub(r'<g id="text_\d+">\s*(<text.*?</text>)\s*</g>', r"\1", svg, flags=re.DOTALL)
    often = Counter(re.findall(r' style="[^"]*"', svg)).most_common(40)
    rules = ""
    for n, (style, times) in enumerate(often):
        if times > 3:
            rules += f".s{n}{{{style[8:-1]}}}"
            svg = svg.replace(style, f' class="s{n}"')
    svg = svg.replace("</style>", f"{rules}</style>", 1)
    return re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", " ", svg)) + "\n"


def check_format(path: Path, where: str | None = None) -> None:
    """Check the file's suffix before any work is done; ``where`` is the option that names it, for the error.

    Raises:
        RequestError: the suffix is not that of a supported picture format.
    """
    if path.suffix.lower() not in FORMATS:
        why = f'"{path.name}" has no suffix of a picture format'
        raise RequestError(where or str(path), why, f"end the name in {', '.join(FORMATS)}")
