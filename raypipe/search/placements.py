"""The named placements of ``auto``; any other placement is given as a tuple of tuples."""

from __future__ import annotations

from raypipe.errors import ScheduleError, nearest
from raypipe.schedule.families import chimera
from raypipe.schedule.shape import NEUTRAL, Shape

OPTIONS: dict[str, frozenset[str]] = {
    "line": frozenset(),
    "ring": frozenset({"chunks"}),
    "v": frozenset({"chunks"}),
    "bidirectional": frozenset({"pipelines"}),
    "encoder": frozenset(),
}
"""Placement -> the options of a shape that it has."""


def placed(name: str, shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Return the device of every stage, one row per replica.

    ``line`` puts stage s on device s. ``ring`` puts V chunks on each device, stage s on device s mod D. ``v`` puts V
    chunks on each device and reverses direction after each pass over the devices, so that the two chunks at a turn
    share a device. ``bidirectional`` runs f pipelines down and f up (Li and Hoefler 2021, Chimera, section 3.1).
    ``encoder`` is a ring of two chunks, of which the first has an encoder's stages and the second those of the model
    that reads it, so that each device has encoder tasks for the gaps that the model's pipeline leaves (the idea of
    Feng et al. 2024, Optimus, arXiv:2408.03505, with the encoder's stages on all devices instead of copies of it).

    Raises:
        ScheduleError: an unknown name, an option that the placement, or a search, has no use for, a bidirectional one
            that does not exist.

    >>> placed("v", Shape(devices=3, microbatches=4, chunks=2))
    ((0, 1, 2, 2, 1, 0),)
    """
    depth, chunks = shape.devices, 2 if name == "encoder" else shape.chunks
    if name == "free":
        raise ScheduleError(
            "placement",
            "free is the placement of a plan's own order, and there is no plan",
            "give the plan (--plan FILE), let the planner find one (parallel: auto), or use line, ring or v",
        )
    if name not in OPTIONS:
        raise ScheduleError("placement", f'"{name}" is unknown', nearest(name, OPTIONS))
    for option, value in shape.options.items():
        if value == NEUTRAL[option] or option in OPTIONS[name] or option == "memory_limit":
            continue
        others = [other for other, own in OPTIONS.items() if option in own]
        fix = f"leave {option} out" + (f", or use placement {' or '.join(others)}" if others else "")
        raise ScheduleError(option, f"auto has no use for {option} = {value} on a {name}", fix)
    if name == "bidirectional":
        chimera.check_bidirectional(shape)
        return chimera.placement(depth, shape.pipelines)
    row: list[int] = []
    for chunk in range(chunks):
        row += reversed(range(depth)) if name == "v" and chunk % 2 else range(depth)
    return (tuple(row),)
