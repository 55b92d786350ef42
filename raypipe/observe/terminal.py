"""Draw a timeline in the terminal: one row per device, time to the right.

    device 0  0123......aa.bb.cc.dd
    device 1  .012....aa3bb.cc.dd..

A digit is the forward of that micro-batch, a lower-case letter its backward (B or BW), a capital its weight gradient
(W), a raised digit its recompute (R); ``v`` a weight gather, ``^`` a reduce-scatter, ``~`` an all-reduce, ``=`` an
update, ``.`` idle. Of a pair, the first half of its time shows the forward, the second the backward. With colours,
cells are shaded by kind and carry the micro-batch's number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby

from rich.console import Console
from rich.text import Text

from raypipe.observe.palette import LOOKS
from raypipe.schedule.ir import Task
from raypipe.schedule.kinds import BACKWARD, NETWORK, TRAITS
from raypipe.simulate.timeline import Span, Timeline

RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹"


def glyph(task: Task) -> str:
    """Return the character that stands for a task."""
    mb = task.mbs[0] if task.mbs else 0
    if task.kind == "F":
        return str(mb % 10)
    if task.kind == "R":
        return RAISED[mb % 10]
    if task.kind == "W":
        return chr(ord("A") + mb % 26)
    if task.kind in BACKWARD:
        return chr(ord("a") + mb % 26)
    return LOOKS[task.kind].sign


def draw(timeline: Timeline, width: int = 100, column: float | None = None) -> list[str]:
    """Draw the timeline as plain lines of at most ``width`` characters, one per device.

    ``column`` is the time of one character; by default it is as small as ``width`` allows.

    >>> from raypipe.schedule import Shape, generate
    >>> from raypipe.schedule.costs import CostTable
    >>> from raypipe.simulate.engine import simulate
    >>> costs = CostTable.even(2)
    >>> print("\\n".join(draw(simulate(generate("1f1b", Shape(devices=2, microbatches=2), costs), costs))))
    device 0  01..aa.bb
    device 1  .0aa1bb..
    """
    heads = _heads(timeline)
    column = column_time([timeline], width - len(heads[0])) if column is None else column
    return [
        head + "".join("." if span is None else glyph(span.task) for span in row)
        for head, row in zip(heads, raster(timeline, column), strict=True)
    ]


def draw_coloured(timeline: Timeline, width: int = 100, column: float | None = None) -> list[Text]:
    """Draw the timeline as styled lines: cells are shaded by kind and numbered; later replicas are bold."""
    heads = _heads(timeline)
    column = column_time([timeline], width - len(heads[0]), zoom=4) if column is None else column
    return [_coloured(head, row) for head, row in zip(heads, raster(timeline, column), strict=True)]


def legend(timelines: Sequence[Timeline], plain: bool = True) -> Text:
    """Return a legend of the characters or colours for the kinds that occur."""
    kinds = {task.kind for timeline in timelines for task in timeline.schedule.tasks()}
    line = Text()
    for kind, look in LOOKS.items():
        if kind in kinds:
            line.append((", " if plain else "  ") if line else "")
            line.append(*((f"{look.sign}:", "") if plain else (f" {kind} ", look.style)))
            line.append(f" {TRAITS[kind].what}{' of that micro-batch' * (kind == 'F')}")
    return line


def show(timelines: Sequence[Timeline], console: Console | None = None) -> None:
    """Print each timeline with its caption: in colour on a terminal, as plain text to a file or pipe.

    Several timelines share one time axis, so that their lengths can be compared.
    """
    console = Console(highlight=False, soft_wrap=True) if console is None else console
    plain = not console.is_terminal
    room = console.width - max((len(_heads(t)[0]) for t in timelines), default=0)
    column = column_time(timelines, room, zoom=1 if plain else 4)
    for timeline in timelines:
        lines = draw(timeline, column=column) if plain else draw_coloured(timeline, column=column)
        for line in lines:
            console.print(line, markup=False, highlight=False)
        console.print(caption(timeline) + "\n", markup=False, highlight=False)
    console.print(legend(timelines, plain), markup=False)


def _heads(timeline: Timeline) -> list[str]:
    last = len(str(max(len(timeline.spans) - 1, 0)))
    return [f"device {d:>{last}}  " for d in range(len(timeline.spans))] or [""]


def _coloured(head: str, row: Sequence[Span | None]) -> Text:
    line = Text(head)
    for span, cells in groupby(row):
        room = len(list(cells))
        if span is None:
            line.append(" " * room)
            continue
        label = ",".join(map(str, span.task.mbs))
        style = LOOKS[span.task.kind].style + (" bold" if span.task.replica else "")
        # If possible, the last column of a task stays blank to separate it from the next task of its kind.
        line.append((label if len(label) <= room else glyph(span.task)).ljust(room)[:room], style)
    return line


def column_time(timelines: Sequence[Timeline], width: int, zoom: int = 1) -> float:
    """Return the time of one column, so that the longest of ``timelines`` takes at most ``width`` columns.

    If all times are multiples of a step that fits, a column is that step, or a fraction of it with up to ``zoom``
    columns per step; otherwise it is an equal share of the longest timeline.
    """
    width = max(width, 1)
    end = max((t.makespan for t in timelines), default=0.0)
    step = _common_step(timelines, end, width)
    if step is None:
        return end / width
    return step / max(1, min(zoom, int(width / round(end / step))))


def raster(timeline: Timeline, column: float) -> list[list[Span | None]]:
    """Return ``[device][column]``: the span at the column's centre, or None where the device idles.

    A span shorter than a column may be hidden. Where an all-reduce overlaps compute, the compute task is shown.
    """
    columns = math.ceil(timeline.makespan / column - 1e-6) if column else 0
    rows: list[list[Span | None]] = []
    halves = timeline.schedule.pairs
    for spans in timeline.spans:
        paired = {halves[task]: (start, end) for task, start, end in spans if task in halves}
        row: list[Span | None] = [None] * columns
        for span in spans:
            if span.task in paired:  # half of its time each, if they ran together
                middle, together = (span.start + span.end) / 2, paired[span.task] == (span.start, span.end)
                first_half = span.task not in timeline.schedule.joined
                if together:
                    span = span._replace(end=middle) if first_half else span._replace(start=middle)
            if span.end <= span.start:
                continue
            first = math.ceil(span.start / column - 0.5 - 1e-6)
            last = math.ceil(span.end / column - 0.5 - 1e-6)
            for c in range(max(first, 0), min(last, columns)):
                covering = row[c]
                if covering is None or covering.task.kind in NETWORK or span.task.kind not in NETWORK:
                    row[c] = span
        rows.append(row)
    return rows


def _common_step(timelines: Sequence[Timeline], end: float, width: int) -> float | None:
    """The greatest common divisor of all times; None if there is none or it needs more than ``width`` columns."""
    total = step = Fraction(end).limit_denominator(1000)
    for time in {t for timeline in timelines for spans in timeline.spans for _, a, b in spans for t in (a, b)}:
        result = Fraction(time).limit_denominator(1000)
        below = result.denominator * step.denominator
        step = Fraction(math.gcd(step.numerator * result.denominator, result.numerator * step.denominator), below)
        if not step or total / step > width or abs(float(result) - time) > 1e-9 * max(1.0, abs(time)):
            return None
    return float(step) if step else None


def caption(timeline: Timeline) -> str:
    """Return a line with name, makespan, bubble ratio and peak activations per device."""
    return (
        f"{timeline.schedule.name}: makespan {timeline.makespan:.6g}, bubble {100 * timeline.bubble_ratio:.1f} %, "
        f"peak activations {folded(timeline.peak_activations)}"
    )


def folded(values: Sequence[float]) -> str:
    """Join the values; runs of three or more equal values are folded, and the middle of a long list is left out.

    >>> folded([4, 3, 2, 1]), folded([16, 16, 16, 8])
    ('4 3 2 1', '16 (x3) 8')
    """
    words = []
    for value, same in groupby(values):
        times = len(list(same))
        words += [f"{value:g} (x{times})"] if times > 2 else [f"{value:g}"] * times
    if len(words) > 12:
        words = [*words[:4], "...", *words[-4:]]
    return " ".join(words)
