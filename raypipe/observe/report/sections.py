"""The sections of a report, each from one part of a run's record."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from raypipe.observe.plan_table import seconds
from raypipe.observe.report.curve_svg import Curve, chart
from raypipe.observe.report.markup import Markup, joined, table, tag
from raypipe.observe.report.timeline_svg import lanes_of, legend, timeline_svg
from raypipe.observe.run_view.event_sentences import event_sentences
from raypipe.observe.run_view.memory_rows import memory_rows
from raypipe.observe.run_view.run_record import RunRecord
from raypipe.plan.reasons import gib

LISTED = 25
"""Candidates that are shown at once; the rest unfolds."""
DRAWN_TASKS = 20_000


def figures(run: RunRecord, summary: dict[str, Any]) -> Markup:
    """The run's main figures, as ``raypipe train --json`` prints them."""

    def figure(name: str, value: Any, form: str, unit: str = "") -> Markup | None:
        if value is None:
            return None
        return tag("div", tag("b", f"{value:{form}}{unit}"), tag("span", name), class_="figure")

    shape = run.parallel
    plan = None
    if shape:
        copies = shape.get("replicas")
        words = f"{shape.get('stages')} stages x {copies} replica{'s' * (copies != 1)}, micro-batches of "
        plan = tag("p", f"Plan: {shape.get('schedule')}, {words}{shape.get('microbatch')}.")
    of = f" of {run.planned_steps}" if run.planned_steps is not None else ""
    boxes = [
        figure(f"steps{of}", summary["steps"], ","),
        figure("training loss", summary["loss"], ".4f"),
        figure("validation loss", summary["val_loss"], ".4f"),
        figure(f"{summary['throughput_unit']} per s", summary["tokens_per_s"], ",.0f"),
        figure("step measured (median)", summary["measured_step_s"], ".4f", " s"),
        figure("step planned, before the run", run.plan.get("predicted_step_s"), ".4f", " s"),
        figure("step predicted, from its first task times", summary["calibrated_step_s"], ".4f", " s"),
        figure("bubbles measured (median)", summary["bubble_ratio"], ".1%"),
        figure("data wait (median)", summary["data_wait_share"] if summary["streams_data"] else None, ".2%"),
        figure("recoveries", summary["recoveries"], "d"),
    ]
    return joined(plan, tag("div", *boxes, class_="figures"))


def schedule(run: RunRecord) -> Markup:
    """The predicted step above the measured one, over the same time axis."""
    steps = {name: lanes_of(run.timelines.get(name)) for name in ("predicted", "measured")}
    drawn = {name: lanes for name, lanes in steps.items() if lanes}
    if not drawn:
        return tag("p", "A run writes its timelines when it finishes; this one has none.", class_="note")
    if sum(len(lane) for lanes in drawn.values() for lane in lanes) > DRAWN_TASKS:
        return tag("p", "The steps have too many tasks to draw; see trace.json in Perfetto.", class_="note")
    end = max(e for lanes in drawn.values() for lane in lanes for _, _, e in lane)
    parts: list[Markup] = []
    for name, lanes in drawn.items():
        step = run.timelines[name]
        facts = f"makespan {1e3 * (step.get('makespan') or 0.0):.4g} ms, bubbles {step.get('bubble_ratio') or 0.0:.1%}"
        parts += [tag("h3", f"{name}: {facts}"), timeline_svg(lanes, end, f"{name} step")]
    zoom: list[Markup] = []
    for n, times in enumerate((1, 2, 4, 8)):
        checked = "checked" if n == 0 else None
        zoom.append(tag("input", type="radio", name="zoom", id=f"zoom{times}", checked=checked))
        zoom.append(tag("label", f"{times}x", for_=f"zoom{times}"))
    about = "Both steps share one time axis. Point at a task for its times; zoom and scroll for details."
    return joined(*zoom, tag("div", *parts), tag("p", about, class_="note"), legend(next(iter(drawn.values()))))


def curves(run: RunRecord) -> Markup:
    """Losses, step time and bubbles over steps."""

    def of(key: str) -> list[tuple[float, float | None]]:
        return [(row["step"], row[key]) for row in run.steps]

    def level(value: Any) -> list[tuple[float, float | None]]:
        known = isinstance(value, float | int) and run.steps
        return [(run.steps[0]["step"], value), (run.steps[-1]["step"], value)] if known else []

    predicted = run.last("predicted") or {}
    validation = [(row["step"], row["val_loss"]) for row in run.validations]
    return joined(
        chart("loss", [Curve("training", of("loss"), "first"), Curve("validation", validation, "second")]),
        chart(
            "step time",
            [Curve("measured", of("step_s"), "first"), Curve("predicted", level(predicted.get("step_s")), "level")],
            " s",
        ),
        chart(
            "bubble ratio",
            [
                Curve("measured", of("bubble_ratio"), "first"),
                Curve("predicted", level(predicted.get("bubble_ratio")), "level"),
            ],
        ),
    )


def plans(run: RunRecord) -> Markup:
    """The candidates that the planner compared, with the reason for every loser."""
    planned = run.last("planned")
    if planned is None:
        return tag("p", "The job's keys or a plan file gave this plan; nothing was compared.", class_="note")
    rows = [_candidate(n, row) for n, row in enumerate(planned["candidates"], 1)]
    head = ["", "schedule", "stages x replicas", "B", "options", "step", "bubbles", "memory", "fits", "why"]
    shown: list[Markup] = [table(head, rows[:LISTED], "plans")]
    if len(rows) > LISTED:
        rest = table(head, rows[LISTED:], "plans")
        shown.append(tag("details", tag("summary", f"{len(rows) - LISTED} more"), rest))
    about = f"{planned.get('searched')} candidates in {planned.get('seconds', 0.0):.3g} s; B is the micro-batch size."
    return joined(tag("p", about, class_="note"), *shown)


def _candidate(number: int, row: dict[str, Any]) -> list[object]:
    options = [
        f"{row['chunks']} chunks" if row.get("chunks", 1) > 1 else "",
        f"tensor {row['tensor']}" if row.get("tensor", 1) > 1 else "",
        f"recompute {row['recompute']}" if row.get("recompute", "none") != "none" else "",
        f"{row['sync']} sums" if row.get("sync", "lazy") != "lazy" else "",
    ]
    step_s, idle, sizes = (row.get(key) for key in ("predicted_step_s", "bubble_ratio", "memory_bytes"))
    return [
        str(number),
        row.get("schedule"),
        f"{row.get('stages')} x {row.get('replicas')}",
        row.get("microbatch"),
        ", ".join(filter(None, options)),
        None if step_s is None else seconds(step_s),
        None if idle is None else f"{idle:.1%}",
        gib(max(sizes)) if sizes else None,
        "yes" if row.get("fits") else "no",
        row.get("why"),
    ]


def memory(run: RunRecord) -> Markup:
    """Memory per device: planned beside measured, with the device's limit."""
    rows = memory_rows(run)
    if not rows:
        why = "Memory is measured when a run finishes, and planned when the planner chooses; this run has neither."
        return tag("p", why, class_="note")
    most = max(value for row in rows for value in (row.planned_bytes, row.measured_bytes) if value is not None)
    cells: list[list[object]] = []
    for row in rows:
        planned, measured = row.planned_bytes, row.measured_bytes
        error = f"{planned / measured - 1:+.1%}" if planned and measured else ""
        cells.append(
            [
                row.name,
                _bar(planned, most, "second"),
                _bar(measured, most, "first"),
                error,
                gib(row.limit_bytes) if row.limit_bytes else "",
            ]
        )
    head = ["device", "planned", "measured (peak)", "planned against measured", "limit"]
    used = [n for n in range(len(head)) if any(row[n] not in (None, "") for row in cells)]
    return table([head[n] for n in used], [[row[n] for n in used] for row in cells])


def _bar(value: float | None, most: float, style: str) -> Markup | None:
    if value is None:
        return None
    bar = tag("span", style=f"width:{100 * value / (most or 1):.1f}%", class_=f"bar {style}")
    return joined(tag("span", bar, class_="track"), tag("span", gib(value), title=f"{value:,.0f} bytes"))


def events(run: RunRecord) -> Markup:
    """List the events: starts, plan changes with predicted and realised gain, undone updates, failures, restarts."""
    rows: list[list[object]] = []
    for event in run.events:
        lines = event_sentences(event)
        if event["event"] == "checkpoint":
            lines = [f"checkpoint of step {event.get('step')}"]
        rows += [[_moment(event.get("time")), event["event"], line] for line in lines]
    if not rows:
        return tag("p", "Nothing was logged.", class_="note")
    return table(["time", "event", "what"], rows, "events")


def _moment(time: Any) -> str:
    try:
        return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def environment(run: RunRecord) -> Markup:
    """Devices and nodes of the newest attempt, and the job as it ran."""
    begun, started = run.last("run") or {}, run.last("started") or {}
    devices = started.get("devices") or []
    rows: list[list[object]] = [
        [d.get("name"), d.get("device"), f"{d.get('parameters', 0):,}", str(d.get("node", ""))[:12]] for d in devices
    ]
    train = run.job.get("train") or {}
    facts: list[list[object]] = [
        ["devices", begun.get("devices")],
        ["cores", begun.get("cores") or "on several hosts, or not counted"],
        ["planned for", (run.plan.get("made_for") or {}).get("device") or "not planned"],
        ["dtype", train.get("dtype")],
        ["seed", train.get("seed")],
        ["run directory", str(run.directory)],
    ]
    job = tag("details", tag("summary", "the job, with all defaults"), tag("pre", _keys(run.job)))
    return joined(table(["", ""], facts), table(["stage", "device", "parameters", "node"], rows) if rows else None, job)


def _keys(value: Any, depth: int = 0) -> str:
    lines = []
    for key, each in value.items():
        if isinstance(each, dict):
            lines += [f"{'  ' * depth}{key}:", _keys(each, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{key}: {each}")
    return "\n".join(lines)
