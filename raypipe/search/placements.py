"""The placements that ``auto`` knows by name; any other is a tuple of tuples."""

from __future__ import annotations

from typing import Literal, get_args

from raypipe.errors import ScheduleError, nearest
from raypipe.schedule.families import chimera
from raypipe.schedule.shape import Shape

Name = Literal["line", "ring", "v", "bidirectional"]


def placed(name: str, shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Device of every stage, one row per replica.

    ``line``: stage s on device s. ``ring``: V chunks a device, stage s on device s mod D. ``v``: V chunks a device,
    there and back again, so that neighbouring chunks share the device at the turn. ``bidirectional``: f pipelines
    down and f up (Li and Hoefler 2021, Chimera, section 3.1).

    Raises:
        ScheduleError: an unknown name, chunks on a placement that has none, a bidirectional one that does not exist.

    >>> placed("v", Shape(devices=3, microbatches=4, chunks=2))
    ((0, 1, 2, 2, 1, 0),)
    """
    depth, chunks = shape.devices, shape.chunks
    if name not in get_args(Name):
        raise ScheduleError("placement", f'"{name}" is unknown', nearest(name, get_args(Name)))
    if chunks > 1 and name in ("line", "bidirectional"):
        raise ScheduleError("chunks", f"a {name} has one stage a device and pipeline", "leave chunks out, or use ring")
    if shape.pipelines != 2 and name != "bidirectional":
        raise ScheduleError("pipelines", f"a {name} is one pipeline", "leave pipelines out, or use bidirectional")
    if name == "bidirectional":
        chimera.check_bidirectional(shape)
        return chimera.placement(depth, shape.pipelines)
    row: list[int] = []
    for chunk in range(chunks):
        row += reversed(range(depth)) if name == "v" and chunk % 2 else range(depth)
    return (tuple(row),)
