"""Colours of the pictures: the hue shows the micro-batch, the lightness the kind of task.

Colours are chosen in OKLCH, where equal lightness looks equally light for every hue, so that kinds stay distinct in
grey print and for colour-blind readers. Source: B. Ottosson, "A perceptual color space for image processing", 2020.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from raypipe.schedule.ir import Schedule, Task
from raypipe.schedule.kinds import BW, Kind


class Look(NamedTuple):
    """How a kind of task is drawn."""

    lightness: float
    chroma: float
    style: str
    """In the terminal: named colours, so that kinds stay distinct where there are only 16."""
    sign: str
    """In plain text: the character, or which one of a micro-batch."""
    trace: str | None = None
    """Chrome's name of a colour; Perfetto ignores it and picks colours by slice name."""


LOOKS: dict[Kind, Look] = {
    "F": Look(0.88, 0.075, "black on bright_blue", "digit", "thread_state_running"),
    "B": Look(0.74, 0.125, "black on bright_green", "letter", "rail_response"),
    BW: Look(0.68, 0.13, "black on green", "letter", "rail_response"),
    "W": Look(0.55, 0.13, "black on yellow", "capital", "rail_animation"),
    "R": Look(0.95, 0.03, "black on white", "raised digit", "grey"),
    "DF": Look(0.90, 0.05, "black on bright_yellow", ">"),
    "CF": Look(0.78, 0.05, "black on bright_cyan", "<"),
    "DB": Look(0.66, 0.05, "black on bright_red", "»"),
    "CB": Look(0.54, 0.05, "white on red", "«"),
    "AG": Look(0.85, 0.0, "black on bright_magenta", "v"),
    "RS": Look(0.70, 0.0, "white on blue", "^"),
    "FREE": Look(0.98, 0.0, "white on black", "_"),
    "AR": Look(0.80, 0.0, "white on magenta", "~"),
    "U": Look(0.45, 0.0, "black on cyan", "="),
}

RGB = tuple[float, float, float]


def colour(task: Task, schedule: Schedule) -> RGB:
    """Return the fill colour of a task; channels are 0..1. With a single micro-batch, the hue shows the stage."""
    return fill(task, schedule.microbatches, schedule.stages)


def fill(task: Task, microbatches: int, stages: int) -> RGB:
    """Return the fill colour of a task of a step of so many micro-batches and stages; channels are 0..1."""
    lightness, chroma = LOOKS[task.kind][:2]
    number, count = (task.mbs[0] if task.mbs else 0), microbatches
    if count == 1:
        number, count = task.stage, stages
    # A sixth of the hue circle is unused; otherwise the last micro-batch would look like the first.
    turn = number / max(count, 4) * 5 / 6
    return oklch(lightness, chroma if task.mbs else 0.0, 250 + 360 * turn)


def grey(kind: Kind) -> RGB:
    """Return the kind's lightness as a grey, for legends."""
    return oklch(LOOKS[kind].lightness, 0.0, 0.0)


def ink(kind: Kind) -> str:
    """Return a text colour that is legible on a kind's fill colour."""
    return "white" if LOOKS[kind].lightness < 0.6 else "#202020"


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
