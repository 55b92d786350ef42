"""An explanation in the terminal: a table, a heat map of devices and causes, and one sentence."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from raypipe.explain.mending import MEANING
from raypipe.observe.explained.explain_run import Explained
from raypipe.observe.plan_table import seconds
from raypipe.observe.tables import text_table

SHADES = " .:-=+*#%@"
"""From nothing to the largest of the map: plain characters, which every terminal and log file has."""
TOLD = 3
"""Causes that are told in words."""
MOST_ROWS = 64
"""Devices in the heat map; of more, the ones that lose most."""


def explanation_table(of: Explained) -> RenderableType:
    """Return everything there is to see."""
    why = of.why
    first, last = of.steps
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    lost = why.step_s - why.ideal_s
    share = f", {lost / why.step_s:.1%} of it lost" if why.step_s else ""
    title = f"{of.schedule.name} on {of.schedule.devices} devices, {steps}: {seconds(why.step_s)} a step, ideal "
    table = text_table(("cause", "where", "lost", "of the step", "mended alone"), left=("cause", "where"))
    for one in why.causes:
        place = "all devices" if one.device is None else f"{'link' if one.links else 'device'} {one.device}"
        table.add_row(
            one.cause,
            place,
            seconds(one.seconds) if one.seconds >= 0 else f"-{seconds(-one.seconds)}",
            f"{one.seconds / why.step_s:.1%}" if why.step_s else "",
            seconds(one.what_if_step_s),
        )
    parts: list[RenderableType] = [Text(f"{title}{seconds(why.ideal_s)}{share}", style="bold"), table]
    parts += [Text(f"{one.cause}: {MEANING[one.cause]}", style="dim") for one in why.causes[:TOLD]]
    parts += [Text(line, style="dim") for line in heat_map(of)]
    parts.append(Text(sentence(of), style="bold"))
    parts += [Text(f"or: {c.what} ({-c.gain:+.1%})", style="dim") for c in of.changes[1:4]]
    parts += [Text(f"note: {note}", style="dim") for note in of.notes]
    return Group(*parts)


def sentence(of: Explained) -> str:
    """Return what to do, in one sentence."""
    best = of.best
    if not of.changes:
        return f"Best change: {best.what}."
    return (
        f"Best change: {best.what}: {seconds(best.predicted_step_s)} a step instead of {seconds(of.why.step_s)} "
        f"({best.gain:.1%} less)."
    )


def heat_map(of: Explained) -> Iterator[str]:
    """Return a row per device and a column per cause, darker where more is lost; nothing where nothing is."""
    causes = [one for one in of.why.causes if one.seconds > 0 and one.devices]
    if not causes:
        return
    most = max(s for one in causes for s in one.devices.values()) or 1.0
    totals = {d: sum(one.devices.get(d, 0.0) for one in causes) for d in range(of.schedule.devices)}
    shown = sorted(sorted(totals, key=lambda d: -totals[d])[:MOST_ROWS])
    width = max(len(one.cause) for one in causes)
    yield f"{'device':>8}  " + "  ".join(f"{one.cause:^{width}}" for one in causes)
    for device in shown:
        cells = []
        for one in causes:
            level = one.devices.get(device, 0.0) / most
            cells.append(f"{SHADES[min(len(SHADES) - 1, round(level * (len(SHADES) - 1)))] * 3:^{width}}")
        yield f"{device:>8}  " + "  ".join(cells)
    if len(shown) < len(totals):
        yield f"          ({len(totals) - len(shown)} devices that lose less are not shown)"
