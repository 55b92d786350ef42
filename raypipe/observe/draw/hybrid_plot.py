"""Speed-up against devices: data parallelism beside every hybrid, as in Figure 5 of Pal et al. 2019."""

from __future__ import annotations

from matplotlib.figure import Figure

from raypipe.observe.draw.palette import oklch
from raypipe.plan.hybrid import Comparison


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
