"""The report of a run as one HTML page that needs nothing else: no network, no script, no font, no picture file."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from raypipe import __version__
from raypipe.errors import RaypipeError
from raypipe.explain.mending import MEANING
from raypipe.observe.explained_run import Explained, explain_run, sentence
from raypipe.observe.plan_table import seconds
from raypipe.observe.report.markup import Curve, Markup, chart, joined, lanes_of, legend, table, tag, timeline_svg
from raypipe.observe.run_view.event_sentences import event_sentences
from raypipe.observe.run_view.run_record import RunRecord, memory_rows
from raypipe.plan.reasons import gib

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Browsers then refuse every request and every script, whatever a run's texts contain."""


def report_page(run: RunRecord) -> str:
    """Return the page.

    Everything on it is from the run directory: metrics.jsonl, events.jsonl, plan.json, job.json and timeline.json.
    """
    summary = run.summary()
    parts: list[tuple[str, Markup]] = [
        ("Predicted and measured step", _schedule(run)),
        ("Where the time goes", _explanation(run)),
        ("Training", _curves(run)),
        ("Plans compared", _plans(run)),
        ("Memory per device", _memory(run)),
        ("Events", _events(run)),
        ("Environment", _environment(run)),
    ]
    broken = [tag("p", f"damaged: {text}", class_="bad") for text in run.damaged]
    links = [tag("a", title, href=f"#part{n}") for n, (title, _) in enumerate(parts)]
    body = tag(
        "body",
        tag("header", tag("h1", run.name, " ", tag("small", run.state())), tag("nav", *links)),
        *broken,
        _figures(run, summary),
        *(tag("section", tag("h2", title), part, id=f"part{n}") for n, (title, part) in enumerate(parts)),
        tag("footer", f"raypipe {__version__} report"),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{run.name}: raypipe report"),
        tag("style", Markup(STYLE)),
    )
    return "<!DOCTYPE html>\n" + tag("html", joined(head, "\n", body), lang="en") + "\n"


STYLE = """
:root{color-scheme:light dark;--ink:#1d2430;--dim:#5c6675;--page:#fff;--panel:#f4f6f9;--line:#d9dee6;
--first:#1f6feb;--second:#c2410c;--idle:#e9edf2}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaf0;--dim:#9aa5b5;--page:#14181f;--panel:#1d232d;--line:#333c49;
--first:#6ea8ff;--second:#ffa46b;--idle:#2a313c}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1100px;padding:1rem;background:var(--page);color:var(--ink);
font:15px/1.45 system-ui,sans-serif;overflow-wrap:anywhere}
h1{margin:0;font-size:1.6rem}h1 small{color:var(--dim);font-weight:400;font-size:1rem}
h2{margin:2rem 0 .6rem;font-size:1.2rem;border-bottom:1px solid var(--line)}h3{font-size:.95rem;margin:.8rem 0 .3rem}
nav{display:flex;flex-wrap:wrap;gap:.3rem 1rem;margin:.4rem 0}a{color:var(--first)}
.note,footer{color:var(--dim);font-size:.85rem}.bad{color:var(--second)}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:.6rem}
.figure{background:var(--panel);border-radius:6px;padding:.5rem .7rem}.figure b{display:block;font-size:1.15rem}
.figure span{color:var(--dim);font-size:.8rem}
.wide{overflow-x:auto;margin:.5rem 0}table{border-collapse:collapse;font-size:.85rem;width:100%}
th,td{text-align:left;vertical-align:top;padding:.25rem .6rem .25rem 0;border-bottom:1px solid var(--line)}
th{color:var(--dim);font-weight:500}.plans tbody:first-of-type tr:first-child td{font-weight:600}
td,th{overflow-wrap:normal}td:last-child{min-width:12em}.events td:first-child{white-space:nowrap}
.track{display:inline-block;width:8rem;margin-right:.5rem}.bar{display:inline-block;height:.7rem;border-radius:2px}
.bar.first{background:var(--first)}.bar.second{background:var(--second)}
.lanes{display:flex}.names{flex:none;width:4.6rem;font-size:.75rem;line-height:26px;color:var(--dim)}
.scroll{flex:1;min-width:0;overflow-x:auto}.lanes svg{display:block}.idle{fill:var(--idle)}
.task{stroke:var(--page);stroke-width:.5}g:hover .task{stroke:var(--ink);stroke-width:1.5}
.lanes text{font-size:11px;text-anchor:middle;dominant-baseline:central;pointer-events:none}
#zoom2:checked~div .zoomed{width:200%}#zoom4:checked~div .zoomed{width:400%}#zoom8:checked~div .zoomed{width:800%}
figure{margin:0 0 1rem}.key{font-size:.8rem;margin-left:.8rem}.key.first{color:var(--first)}
.key.second{color:var(--second)}.key.level{color:var(--dim)}
.axes{display:flex}.scale{display:flex;flex-direction:column;justify-content:space-between;width:5rem;height:180px;
flex:none;font-size:.72rem;color:var(--dim)}.grow{flex:1;min-width:0}
.steps{display:flex;justify-content:space-between;font-size:.72rem;color:var(--dim)}
.plot{display:block;overflow:visible;border-left:1px solid var(--line);border-bottom:1px solid var(--line)}
polyline{fill:none;stroke-width:1.6;vector-effect:non-scaling-stroke}
polyline.first{stroke:var(--first)}polyline.second{stroke:var(--second)}
polyline.level{stroke:var(--dim);stroke-dasharray:5 4}
circle{opacity:.75}circle.first{fill:var(--first)}circle.second{fill:var(--second)}circle.level{fill:var(--dim)}
pre{background:var(--panel);padding:.7rem;overflow-x:auto;font-size:.8rem}
"""


LISTED = 25
"""Candidates that are shown at once; the rest unfolds."""
DRAWN_TASKS = 20_000


def _figures(run: RunRecord, summary: dict[str, Any]) -> Markup:
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


def _schedule(run: RunRecord) -> Markup:
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


def _curves(run: RunRecord) -> Markup:
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


def _plans(run: RunRecord) -> Markup:
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


def _memory(run: RunRecord) -> Markup:
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


def _events(run: RunRecord) -> Markup:
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


def _environment(run: RunRecord) -> Markup:
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


MOST_DEVICES = 64
"""Rows of the heat map; of more devices, those that lose most."""


def _explanation(run: RunRecord) -> Markup:
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
