"""Colours of the pictures: the hue shows the micro-batch, the lightness the kind of task.

Colours are chosen in OKLCH, where equal lightness looks equally light for every hue, so that kinds stay distinct in
grey print and for colour-blind readers. Source: B. Ottosson, "A perceptual color space for image processing", 2020.
"""

from __future__ import annotations

import math

from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import Kind

SHADES: dict[Kind, tuple[float, float]] = {
    "F": (0.88, 0.075),
    "B": (0.74, 0.125),
    "BW": (0.68, 0.13),
    "W": (0.55, 0.13),
    "R": (0.95, 0.03),
    "AG": (0.85, 0.0),
    "RS": (0.70, 0.0),
    "FREE": (0.98, 0.0),
    "AR": (0.80, 0.0),
    "U": (0.45, 0.0),
}
"""Lightness and chroma of each kind."""

RGB = tuple[float, float, float]


def colour(task: Task, schedule: Schedule) -> RGB:
    """Return the fill colour of a task; channels are 0..1. With a single micro-batch, the hue shows the stage."""
    return fill(task, schedule.microbatches, schedule.stages)


def fill(task: Task, microbatches: int, stages: int) -> RGB:
    """Return the fill colour of a task of a step of so many micro-batches and stages; channels are 0..1."""
    lightness, chroma = SHADES[task.kind]
    number, count = (task.mbs[0] if task.mbs else 0), microbatches
    if count == 1:
        number, count = task.stage, stages
    # A sixth of the hue circle is unused; otherwise the last micro-batch would look like the first.
    turn = number / max(count, 4) * 5 / 6
    return oklch(lightness, chroma if task.mbs else 0.0, 250 + 360 * turn)


def grey(kind: Kind) -> RGB:
    """Return the kind's lightness as a grey, for legends."""
    return oklch(SHADES[kind][0], 0.0, 0.0)


def ink(kind: Kind) -> str:
    """Return a text colour that is legible on a kind's fill colour."""
    return "white" if SHADES[kind][0] < 0.6 else "#202020"


def oklch(lightness: float, chroma: float, hue: float) -> RGB:
    """Convert an OKLCH colour to sRGB, clipped to the displayable range; ``hue`` is in degrees."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        _gamma(+4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short),
        _gamma(-1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short),
        _gamma(-0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short),
    )


def _gamma(linear: float) -> float:
    linear = min(max(linear, 0.0), 1.0)
    return 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
