"""The device grid: a schedule's orders as text for error messages, one row per device.

It shows positions, not times, because a schedule that cannot run has no times.
"""

from __future__ import annotations

from raypipe.schedule.ir import Schedule


def grid(schedule: Schedule, mark: tuple[int, int] | None = None, around: int = 6, rows: int = 8) -> str:
    """Draw the orders, with the task at ``mark`` = (device, position) between ``>`` and ``<``.

    Large schedules are cut to ``around`` positions and ``rows`` devices on either side of the mark.

    >>> from raypipe.schedule import Shape, generate
    >>> print(grid(generate("1f1b", Shape(devices=2, microbatches=2)), mark=(1, 1)))
    device 0: 0F0 0F1    0BW0 0BW1
    device 1: 1F0 >1BW0< 1F1  1BW1   <-- here
    """
    at_device, at = mark if mark is not None else (0, 0)
    longest = max((len(o) for o in schedule.orders), default=0)
    columns = range(max(0, at - around), min(longest, at + around + 1))
    shown = range(max(0, at_device - rows), min(schedule.devices, at_device + rows + 1))
    cells: list[list[str]] = []
    for d in shown:
        order = schedule.orders[d]
        row = [str(order[k]) if k < len(order) else "" for k in columns]
        if d == at_device and mark is not None and at in columns and at < len(order):
            row[at - columns.start] = f">{order[at]}<"
        cells.append(row)
    widths = [max((len(r[k]) for r in cells), default=0) for k in range(len(columns))]
    label = len(str(shown[-1])) if len(shown) else 1
    lines = [f"... {shown.start} devices above"] if shown.start else []
    for d, row in zip(shown, cells, strict=True):
        text = " ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        before = "... " if columns.start else ""
        after = " ..." if columns.stop < len(schedule.orders[d]) else ""
        here = "   <-- here" if mark is not None and d == at_device else ""
        lines.append(f"device {d:>{label}}: {before}{text}{after}{here}")
    if shown.stop < schedule.devices:
        lines.append(f"... {schedule.devices - shown.stop} devices below")
    return "\n".join(lines)
