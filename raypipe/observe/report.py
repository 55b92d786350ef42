"""The report of a run as one HTML page that needs nothing else: no network, no script, no font, no picture file.

``report.html`` is its template, which escapes every text; here are the figures that it shows. Curves over steps fill
the width of the page. A step has a lane per device and a box per task that explains itself under the pointer; its
places are percentages, so that the picture can be widened (zoomed into) without scaling its text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from raypipe import __version__
from raypipe.errors import RaypipeError
from raypipe.explain.replay import MEANING
from raypipe.observe.explained_run import Explained, cause_cells, explain_run, most_lost, sentence
from raypipe.observe.palette import fill, ink
from raypipe.observe.plan_table import seconds
from raypipe.observe.run_log import event_sentences
from raypipe.observe.run_record import RunRecord, memory_rows
from raypipe.observe.timelines import Lanes, lanes_of
from raypipe.plan.reasons import gib
from raypipe.schedule.kinds import NETWORK, TRAITS

DRAWN_TASKS = 20_000
DOTS = 60
"""Curves of up to so many points show each point."""
LABEL_FROM = 1.6
"""Boxes of so many percent of the width have room for a character of their label."""
Points = Sequence[tuple[float, float | None]]
"""Step and value; None or a number that is not finite interrupts the curve."""


def report_page(run: RunRecord) -> str:
    """Return the page.

    Everything on it is from the run directory: metrics.jsonl, events.jsonl, plan.json, job.json and timeline.json.
    """
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.get_template("report.html").render(
        run=run,
        version=__version__,
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
    drawn = {name: lanes for name in ("predicted", "measured") if (lanes := lanes_of(run.timelines.get(name)))}
    spans = [span for lanes in drawn.values() for lane in lanes for span in lane]
    if not spans:
        return {"steps": [], "unseen": "A run writes its timelines when it finishes; this one has none."}
    if len(spans) > DRAWN_TASKS:
        return {"steps": [], "unseen": "The steps have too many tasks to draw; see trace.json in Perfetto."}
    end_s = max(end for _, _, end in spans) or 1.0
    steps = []
    for name, lanes in drawn.items():
        step = run.timelines[name]
        facts = f"makespan {1e3 * (step.get('makespan') or 0.0):.4g} ms, bubbles {step.get('bubble_ratio') or 0.0:.1%}"
        steps.append({"name": name, "facts": facts, "lanes": list(_boxes(lanes, end_s))})
    kinds = sorted({task.kind for task, _, _ in spans}, key=list(TRAITS).index)
    return {"steps": steps, "kinds": ", ".join(f"{kind} {TRAITS[kind].what}" for kind in kinds)}


def _boxes(lanes: Lanes, end_s: float) -> Iterator[list[dict[str, Any]]]:
    """Yield the boxes of each device; ``end_s`` is the time at the right edge."""
    tasks = [task for lane in lanes for task, _, _ in lane]
    microbatches = 1 + max((mb for task in tasks for mb in task.mbs), default=0)
    stages = 1 + max((task.stage for task in tasks), default=0)
    for device, lane in enumerate(lanes):
        boxes = []
        for task, start, end in sorted(lane, key=lambda span: span[0].kind in NETWORK):  # collectives are drawn last
            left, width, number = 100 * start / end_s, 100 * (end - start) / end_s, ",".join(map(str, task.mbs))
            what = f"{task}: {TRAITS[task.kind].what}, stage {task.stage}"
            what += f", micro-batch {number}" * bool(number) + f", replica {task.replica}" * bool(task.replica)
            what += f"; device {device}, {1e3 * start:.4g} to {1e3 * end:.4g} ms ({1e3 * (end - start):.4g} ms)"
            strip = task.kind in NETWORK
            box = {"left": f"{left:.4f}", "width": f"{width:.4f}", "middle": f"{left + width / 2:.4f}"}
            colour = "".join(f"{round(255 * channel):02x}" for channel in fill(task, microbatches, stages))
            label = number if not strip and width >= LABEL_FROM * max(len(number), 1) else ""
            boxes.append(
                box | {"title": what, "strip": strip, "fill": f"#{colour}", "label": label, "ink": ink(task.kind)}
            )
        yield boxes


def _charts(run: RunRecord) -> list[dict[str, Any]]:
    """Return losses, step time and bubbles over steps."""

    def of(key: str) -> Points:
        return [(row["step"], row[key]) for row in run.steps]

    def level(key: str) -> Points:
        value = (run.last("predicted") or {}).get(key)
        ends = (run.steps[0], run.steps[-1]) if isinstance(value, float | int) and run.steps else ()
        return [(row["step"], value) for row in ends]

    validation = [(row["step"], row["val_loss"]) for row in run.validations]
    return [
        _chart("loss", "", ("training", "first", of("loss")), ("validation", "second", validation)),
        _chart("step time", " s", ("measured", "first", of("step_s")), ("predicted", "level", level("step_s"))),
        _chart(
            "bubble ratio",
            "",
            ("measured", "first", of("bubble_ratio")),
            ("predicted", "level", level("bubble_ratio")),
        ),
    ]


def _chart(title: str, unit: str, *curves: tuple[str, str, Points]) -> dict[str, Any]:
    """Return curves (name, style, points) over one axis of steps; every point says its value under the pointer."""
    known = [(x, y) for _, _, points in curves for x, y in points if y is not None and math.isfinite(y)]
    if not known:
        return {"title": title, "curves": []}
    first, last = min(x for x, _ in known), max(x for x, _ in known)
    low, high = min(y for _, y in known), max(y for _, y in known)
    room = 0.05 * (high - low) or abs(high) or 1.0
    low, high = low - room, high + room

    def place(x: float, y: float) -> tuple[str, str]:
        across = 50.0 if last == first else 100 * (x - first) / (last - first)
        return f"{across:.3f}", f"{100 * (high - y) / (high - low):.3f}"

    made = []
    for name, style, points in curves:
        pieces = groupby(points, key=lambda point: point[1] is not None and math.isfinite(point[1]))
        lines = [[(x, y) for x, y in piece if y is not None] for drawn, piece in pieces if drawn]
        dots = [point for line in lines for point in line]
        if len(dots) > DOTS:  # too close to point at: every so many, and the last one
            dots = [*dots[: -1 : math.ceil(len(dots) / DOTS)], dots[-1]]
        made.append(
            {
                "name": name,
                "style": style,
                "lines": [" ".join(",".join(place(x, y)) for x, y in line) for line in lines],
                "dots": [(*place(x, y), f"{name}, step {x:g}: {y:.6g}{unit}") for x, y in dots],
            }
        )
    ends = {"high": f"{high:.4g}{unit}", "low": f"{low:.4g}{unit}", "first": f"{first:g}", "last": f"{last:g}"}
    return {"title": title, "curves": made, **ends}


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
