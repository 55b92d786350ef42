"""Plots of values over an axis: live activations over time, and the speed-up of hybrids over devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from raypipe.observe.draw.palette import oklch
from raypipe.plan.hybrid import Comparison
from raypipe.simulate.timeline import Timeline, live_activations

MOST_LANES = 16


def memory_plot(timelines: Sequence[Timeline], width: float = 10.0, time_label: str = "time") -> Figure:
    """Plot the live activations of each timeline; all share one time axis.

    Devices of one timeline share a memory axis. Timelines do not, because the unit is one stage's activation and their
    stages may differ in size.

    Args:
        timelines: the steps to draw.
        width: width of the page, in inches.
        time_label: label of the time axis.
    """
    # If there are more devices than fit a page, show evenly spaced ones, including the first and the last.
    shown = [_choose(len(t.spans)) for t in timelines]
    curves = [live_activations(t) for t in timelines]
    end = max((t.makespan for t in timelines), default=0.0) or 1.0
    lane, gap, head, foot = 0.42, 0.38, 0.32, 0.42
    height = head + foot + gap * (len(timelines) - 1) + lane * sum(map(len, shown))
    figure = Figure(figsize=(width, height))
    left, right = 0.95 / width, 1 - 0.3 / width
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
                axes.set_xlabel(time_label, fontsize=8, labelpad=1)
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


def hybrid_plot(found: Comparison, title: str, width: float = 7.0) -> Figure:
    """One line per strategy over a logarithmic device axis; a dashed line marks the tipping point.

    Args:
        found: the rows to draw.
        title: above the axes.
        width: of the page, in inches.
    """
    figure = Figure(figsize=(width, width * 0.6), layout="constrained")
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
