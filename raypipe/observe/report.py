"""The report of a run as one HTML page that needs nothing else: no network, no script, no font, no picture file.

``report.html`` is its template; here are the figures that it shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from raypipe.errors import RaypipeError
from raypipe.explain.replay import MEANING
from raypipe.observe.explained_run import Explained, cause_cells, explain_run, most_lost, sentence
from raypipe.observe.pages import Points, chart, drawn_steps, page
from raypipe.observe.run_log import event_sentences
from raypipe.observe.run_record import RunRecord, by_model, memory_rows
from raypipe.observe.tables import seconds
from raypipe.observe.timelines import lanes_of
from raypipe.plan.reasons import gib

TITLES = (
    "Predicted and measured step",
    "Where the time goes",
    "Training",
    "Plans compared",
    "Memory per device",
    "Events",
    "Environment",
)


def report_page(run: RunRecord) -> str:
    """Return the page.

    Everything on it is from the run directory: metrics.jsonl, events.jsonl, plan.json, job.json and timeline.json.
    """
    return page(
        "report.html",
        name=run.name,
        state=run.state(),
        what="report",
        titles=TITLES,
        run=run,
        plan=_plan(run.parallel),
        figures=list(_figures(run)),
        **_steps(run),
        why=_explanation(run),
        charts=_charts(run),
        planned=_plans(run),
        memory=_memory(run),
        events=_events(run),
        **_environment(run),
    )


def _plan(shape: dict[str, Any]) -> str | None:
    if not shape:
        return None
    copies = shape.get("replicas")
    words = f"{shape.get('stages')} stages x {copies} replica{'s' * (copies != 1)}, micro-batches of "
    return f"{shape.get('schedule')}, {words}{shape.get('microbatch')}"


def _figures(run: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield the run's main figures, as ``raypipe train --json`` prints them: name and value."""
    summary = run.summary()
    of = f" of {run.planned_steps}" if run.planned_steps is not None else ""
    for name, value, form in (
        (f"steps{of}", summary["steps"], "{:,}"),
        ("training loss", summary["loss"], "{:.4f}"),
        ("validation loss", summary["val_loss"], "{:.4f}"),
        (f"{summary['throughput_unit']} per s", summary["tokens_per_s"], "{:,.0f}"),
        ("step measured (median)", summary["measured_step_s"], "{:.4f} s"),
        ("step planned, before the run", run.plan.get("predicted_step_s"), "{:.4f} s"),
        ("step predicted, from its first task times", summary["calibrated_step_s"], "{:.4f} s"),
        ("bubbles measured (median)", summary["bubble_ratio"], "{:.1%}"),
        ("data wait (median)", summary["data_wait_share"] if summary["streams_data"] else None, "{:.2%}"),
        ("busiest expert's tokens over the mean (median)", summary["expert_load"], "{:.2f}"),
        ("recoveries", summary["recoveries"], "{:d}"),
    ):
        if value is not None:
            yield name, form.format(value)


def _steps(run: RunRecord) -> dict[str, Any]:
    """Return the predicted step and the measured one, over the same time axis; where there is none, why."""
    lanes = {name: own for name in ("predicted", "measured") if (own := lanes_of(run.timelines.get(name)))}
    if not any(lane for own in lanes.values() for lane in own):
        return {"steps": [], "unseen": "A run writes its timelines when it finishes; this one has none."}
    told = {name: run.timelines[name] for name in lanes}
    facts = {
        name: f"makespan {1e3 * (step.get('makespan') or 0.0):.4g} ms, bubbles {step.get('bubble_ratio') or 0.0:.1%}"
        for name, step in told.items()
    }
    drawn = drawn_steps(lanes, facts)
    return drawn or {"steps": [], "unseen": "The steps have too many tasks to draw; see trace.json in Perfetto."}


def _charts(run: RunRecord) -> list[dict[str, Any]]:
    """Return losses, step time and bubbles over steps."""

    def of(key: str) -> Points:
        return [(row["step"], row[key]) for row in run.steps]

    def level(key: str) -> Points:
        value = (run.last("predicted") or {}).get(key)
        ends = (run.steps[0], run.steps[-1]) if isinstance(value, float | int) and run.steps else ()
        return [(row["step"], value) for row in ends]

    validation = [(row["step"], row["val_loss"]) for row in run.validations]
    losses: list[tuple[str, str, Points]] = [
        (name or "training", "second" if n % 2 else "first", [(row["step"], row["loss"]) for row in rows])
        for n, (name, rows) in enumerate(by_model(run.steps).items())
    ]
    return [
        chart("loss", "", *losses, ("validation", "second", validation)),
        chart("step time", " s", ("measured", "first", of("step_s")), ("predicted", "level", level("step_s"))),
        chart(
            "bubble ratio",
            "",
            ("measured", "first", of("bubble_ratio")),
            ("predicted", "level", level("bubble_ratio")),
        ),
    ]


def _plans(run: RunRecord) -> dict[str, Any] | None:
    """Return the candidates that the planner compared, with the reason for every loser."""
    planned = run.last("planned")
    if planned is None:
        return None
    head = ["", "schedule", "stages x replicas", "B", "options", "step", "bubbles", "memory", "fits", "why"]
    about = f"{planned.get('searched')} candidates in {planned.get('seconds', 0.0):.3g} s; B is the micro-batch size."
    return {
        "about": about,
        "head": head,
        "rows": [_candidate(n, row) for n, row in enumerate(planned["candidates"], 1)],
    }


def _candidate(number: int, row: dict[str, Any]) -> list[object]:
    options = [
        f"{row['chunks']} chunks" if row.get("chunks", 1) > 1 else "",
        f"tensor {row['tensor']}" if row.get("tensor", 1) > 1 else "",
        f"recompute {row['recompute']}" if row.get("recompute", "none") != "none" else "",
        f"{row['sync']} sums" if row.get("sync", "lazy") != "lazy" else "",
    ]
    step_s, idle, sizes = (row.get(key) for key in ("predicted_step_s", "bubble_ratio", "memory_bytes"))
    return [
        number,
        row.get("schedule", ""),
        f"{row.get('stages')} x {row.get('replicas')}",
        row.get("microbatch", ""),
        ", ".join(filter(None, options)),
        "" if step_s is None else seconds(step_s),
        "" if idle is None else f"{idle:.1%}",
        gib(max(sizes)) if sizes else "",
        "yes" if row.get("fits") else "no",
        row.get("why", ""),
    ]


def _memory(run: RunRecord) -> tuple[list[str], list[list[object]]] | None:
    """Return memory per device: planned beside measured, with the device's limit; columns that say nothing left out."""
    rows = memory_rows(run)
    most = max((v for row in rows for v in (row.planned_bytes, row.measured_bytes) if v is not None), default=0) or 1

    def bar(value: float | None, style: str) -> object:
        if value is None:
            return ""
        return {"bar": f"{100 * value / most:.1f}", "style": style, "title": f"{value:,.0f} bytes", "text": gib(value)}

    cells: list[list[object]] = [
        [
            row.name,
            bar(row.planned_bytes, "second"),
            bar(row.measured_bytes, "first"),
            f"{row.planned_bytes / row.measured_bytes - 1:+.1%}" if row.planned_bytes and row.measured_bytes else "",
            gib(row.limit_bytes) if row.limit_bytes else "",
        ]
        for row in rows
    ]
    head = ["device", "planned", "measured (peak)", "planned against measured", "limit"]
    used = [n for n in range(len(head)) if any(row[n] != "" for row in cells)]
    return ([head[n] for n in used], [[row[n] for n in used] for row in cells]) if rows else None


def _events(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return the events: starts, plan changes with predicted and realised gain, undone updates, failures, restarts."""
    rows = []
    for event in run.events:
        told = event["event"] == "checkpoint"
        lines = [f"checkpoint of step {event.get('step')}"] if told else event_sentences(event)
        rows += [(_moment(event.get("time")), event["event"], line) for line in lines]
    return rows


def _moment(time: Any) -> str:
    try:
        return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _environment(run: RunRecord) -> dict[str, Any]:
    """Return devices and nodes of the newest attempt, and the job as it ran."""
    begun, started, train = run.last("run") or {}, run.last("started") or {}, run.job.get("train") or {}
    facts = [
        ("devices", begun.get("devices", "")),
        ("cores", begun.get("cores") or "on several hosts, or not counted"),
        ("planned for", (run.plan.get("made_for") or {}).get("device") or "not planned"),
        ("dtype", train.get("dtype", "")),
        ("seed", train.get("seed", "")),
        ("run directory", run.directory),
    ]
    devices = [
        (d.get("name"), d.get("device"), f"{d.get('parameters', 0):,}", str(d.get("node", ""))[:12])
        for d in started.get("devices") or []
    ]
    return {"facts": facts, "devices": devices, "job": _keys(run.job)}


def _keys(value: Any, depth: int = 0) -> str:
    lines = []
    for key, each in value.items():
        nested = isinstance(each, dict)
        lines.append(f"{'  ' * depth}{key}:" + ("" if nested else f" {each}"))
        lines += [_keys(each, depth + 1)] if nested else []
    return "\n".join(lines)


def _explanation(run: RunRecord) -> dict[str, Any] | str:
    """Return where the time of the newest steps went; where nothing can be explained, why."""
    try:
        result = explain_run(run)
    except RaypipeError as error:
        return str(error)
    why, (first, last) = result.why, result.steps
    about = (
        f"Steps {first} to {last}: {seconds(why.step_s)} a step; the same work divided evenly over all devices "
        f"that never wait would take {seconds(why.ideal_s)}. What is between, by cause:"
    )
    return {
        "about": about,
        "causes": [[*cause_cells(result, lost), MEANING[lost.cause]] for lost in why.causes],
        "heat": _heat_map(result),
        "sentence": sentence(result),
        "changes": [(c.what, seconds(c.predicted_step_s), f"{c.gain:.1%}") for c in result.changes],
        "notes": result.notes,
    }


def _heat_map(found: Explained) -> tuple[list[str], list[list[object]]] | None:
    """Return a row per device and a column per cause; the darker a cell, the more is lost there."""
    causes, shown, most = most_lost(found)
    rows: list[list[object]] = [
        [
            f"device {device}",
            *(
                {"shade": f"{100 * value / most:.0f}", "text": seconds(value) if value > 0 else ""}
                for value in (lost.devices.get(device, 0.0) for lost in causes)
            ),
        ]
        for device in shown
    ]
    return (["", *(lost.cause for lost in causes)], rows) if causes else None
