"""The section of a report that says where a step's time goes: causes, a heat map of devices, what to change."""

from __future__ import annotations

from raypipe.errors import RaypipeError
from raypipe.explain.mending import MEANING
from raypipe.observe.explained.explain_run import Explained, explain_run
from raypipe.observe.explained.table import sentence
from raypipe.observe.plan_table import seconds
from raypipe.observe.report.markup import Markup, joined, table, tag
from raypipe.observe.run_view.run_record import RunRecord

MOST_DEVICES = 64
"""Rows of the heat map; of more devices, those that lose most."""


def explanation(run: RunRecord) -> Markup:
    """Return the section; where nothing can be explained, why."""
    try:
        found = explain_run(run)
    except RaypipeError as error:
        return tag("p", f"Nothing to explain: {error}", class_="note")
    return _section(found)


def _section(found: Explained) -> Markup:
    why, (first, last) = found.why, found.steps
    about = (
        f"Steps {first} to {last}: {seconds(why.step_s)} a step; the same work divided evenly over all devices "
        f"that never wait would take {seconds(why.ideal_s)}. What is between, by cause:"
    )
    rows: list[list[object]] = [
        [
            lost.cause,
            "all devices" if lost.device is None else str(lost.device),
            _signed(lost.seconds),
            f"{lost.seconds / why.step_s:.1%}" if why.step_s else "",
            seconds(lost.what_if_step_s),
            MEANING[lost.cause],
        ]
        for lost in why.causes
    ]
    head = ["cause", "where", "lost", "of the step", "step if mended alone", "what it is"]
    changes: list[list[object]] = [
        [change.what, seconds(change.predicted_step_s), f"{change.gain:.1%}"] for change in found.changes
    ]
    return joined(
        tag("p", about, class_="note"),
        table(head, rows),
        _heat_map(found),
        tag("p", tag("b", sentence(found))),
        table(["change", "predicted step", "gain"], changes) if changes else None,
        *(tag("p", f"Note: {note}", class_="note") for note in found.notes),
    )


def _signed(value: float) -> str:
    return seconds(value) if value >= 0 else f"-{seconds(-value)}"


def _heat_map(found: Explained) -> Markup | None:
    """A row per device, a column per cause; the darker a cell, the more is lost there."""
    causes = [lost for lost in found.why.causes if lost.seconds > 0 and lost.devices]
    if not causes:
        return None
    most = max(value for lost in causes for value in lost.devices.values()) or 1.0
    totals = {d: sum(lost.devices.get(d, 0.0) for lost in causes) for d in range(found.schedule.devices)}
    rows: list[list[object]] = []
    for device in sorted(sorted(totals, key=lambda d: -totals[d])[:MOST_DEVICES]):
        cells: list[object] = [f"device {device}"]
        for lost in causes:
            value = lost.devices.get(device, 0.0)
            shade = f"background:color-mix(in srgb,var(--second) {100 * value / most:.0f}%,transparent)"
            cells.append(tag("span", seconds(value) if value > 0 else "", class_="track", style=shade))
        rows.append(cells)
    return table(["", *(lost.cause for lost in causes)], rows)
