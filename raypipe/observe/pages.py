"""Pages of one HTML file each, without scripts or network: steps drawn as lanes, curves, tables; the page that compares
plans (``raypipe autoconfigure --html FILE``), with the figures of the terminal's table.

The templates beside this file (``parts.html``, ``page.html``, ``plans.html``) escape every text. Curves fill the width
of the page. A step has a lane per device and a box per task that explains itself under the pointer; its places are
percentages, so that the picture can be widened (zoomed into) without scaling its text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from raypipe import __version__
from raypipe.observe.palette import fill, ink
from raypipe.observe.plan_table import best_small, details, ranked, searched, timeline_of
from raypipe.observe.tables import seconds
from raypipe.observe.timelines import Lanes
from raypipe.plan.choose import Decision, label
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.reasons import gib
from raypipe.schedule.costs import CostTable, each_latency, latency
from raypipe.schedule.deps import link
from raypipe.schedule.kinds import BOOKKEEPING, NETWORK, TRAITS
from raypipe.simulate.timeline import Timeline, live_activations

DRAWN_TASKS = 20_000
DOTS = 60
"""Curves of up to so many points show each point."""
LABEL_FROM = 1.6
"""Boxes of so many percent of the width have room for a character of their label."""
Points = Sequence[tuple[float, float | None]]
"""Place on the axis and value; None or a number that is not finite interrupts the curve."""


def page(template: str, **values: Any) -> str:
    """Return a page from its template."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.get_template(template).render(version=__version__, **values)


def drawn_steps(lanes: Mapping[str, Lanes], facts: Mapping[str, str]) -> dict[str, Any] | None:
    """Return steps by name over one time axis, with the kinds of their tasks; None if there are too many tasks."""
    spans = [span for own in lanes.values() for lane in own for span in lane]
    if len(spans) > DRAWN_TASKS:
        return None
    end_s = max((end for _, _, end in spans), default=0.0) or 1.0
    kinds = sorted({task.kind for task, _, _ in spans}, key=list(TRAITS).index)
    return {
        "steps": [
            {"name": name, "facts": facts[name], "lanes": list(_boxes(own, end_s))} for name, own in lanes.items()
        ],
        "kinds": ", ".join(f"{kind} {TRAITS[kind].what}" for kind in kinds),
    }


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


def chart(title: str, unit: str, *curves: tuple[str, str, Points], axis: str = "step") -> dict[str, Any]:
    """Return curves (name, style, points) over one axis; every point says its value under the pointer."""
    known = [(x, y) for _, _, points in curves for x, y in points if y is not None and math.isfinite(y)]
    if not known:
        return {"title": title, "curves": []}
    first, last = min(x for x, _ in known), max(x for x, _ in known)
    low, high = min(y for _, y in known), max(y for _, y in known)
    room = 0.05 * (high - low) or abs(high) or 1.0
    low, high = (low - room if low < 0 else max(low - room, 0.0)), high + room

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
                "dots": [(*place(x, y), f"{name}, {axis} {x:g}: {y:.6g}{unit}") for x, y in dots],
            }
        )
    ends = {"high": f"{high:.4g}{unit}", "low": f"{low:.4g}{unit}", "first": f"{first:g}", "last": f"{last:g}"}
    return {"title": title, "curves": made, "axis": axis, **ends}


TITLES = ("The best plans, step by step", "All plans compared", "Memory", "Devices and links", "If one cost changed")
DRAWN_DEVICES = 64
LARGEST = 5
"""Terms of memory that are named."""
FASTER = 0.5
"""Messages and collectives take this share of their time where the network is twice as fast."""


def plans_page(decision: Decision, name: str) -> str:
    """Return the page of a decision; ``name`` is the job's."""
    p = decision.best
    drawn = best_small(decision, DRAWN_DEVICES, DRAWN_TASKS // 3)
    timelines = {f"{n}. {_words(one)}": timeline_of(one) for n, one in enumerate(drawn, 1)}
    chosen = next(iter(timelines.values())) if drawn and drawn[0] is p else None
    return page(
        "plans.html",
        name=name,
        state="plans compared",
        what="plans",
        titles=TITLES,
        plan=_words(p),
        figures=list(_figures(decision)),
        unseen="The step has too many devices or tasks to draw.",
        **_steps(timelines),
        about=f"{searched(decision)}. B is the micro-batch size, N the number of micro-batches of a copy.",
        ranked=ranked(decision),
        notes=decision.notes,
        memory=_memory(p),
        fullest=p.fullest,
        terms=_terms(p),
        charts=[] if chosen is None else [_over_time(p, chosen)],
        links=None if chosen is None else _links(p, chosen),
        changes=None if chosen is None else list(_changes(p, chosen)),
    )


def _words(p: Prediction) -> str:
    c = p.candidate
    parts = ((c.stages, "stage"), (c.replicas, "replica"))
    shape = " x ".join(f"{n} {name}{'s' * (n != 1)}" for n, name in parts)
    shape += f" x {c.tensor} tensor-parallel" if c.tensor > 1 else ""
    more = details(p)
    return f"{label(c)}, {shape}, micro-batches of {c.microbatch}" + (f", {more}" if more else "")


def _figures(decision: Decision) -> Iterator[tuple[str, str]]:
    p = decision.best
    yield "devices", f"{decision.plan.parallel.devices:,}"
    yield "step predicted", seconds(p.step_s)
    yield "samples per s", f"{p.throughput:,.4g}"
    yield "bubbles", f"{p.bubble_ratio:.1%}"
    yield f"free on device {p.fullest}, the fullest", gib(-p.excess)
    certificate = decision.rows[0].certificate
    if certificate is not None:
        yield "no plan of this division is shorter than", seconds(certificate.bound_s)


def _steps(timelines: dict[str, Timeline]) -> dict[str, Any]:
    lanes = {name: [[(s.task, s.start, s.end) for s in lane] for lane in t.spans] for name, t in timelines.items()}
    facts = {name: f"makespan {seconds(t.makespan)}, bubbles {t.bubble_ratio:.1%}" for name, t in timelines.items()}
    return (drawn_steps(lanes, facts) if lanes else None) or {"steps": []}


def _memory(p: Prediction) -> tuple[list[str], list[list[object]]]:
    """Return a row per device of one copy."""
    most = max(p.capacities)

    def bar(value: float, style: str) -> object:
        return {"bar": f"{100 * value / most:.1f}", "style": style, "title": f"{value:,.0f} bytes", "text": gib(value)}

    rows = [
        [f"device {d}", bar(m.planned, "first"), bar(m.reserved, "second"), gib(capacity - m.total), gib(capacity)]
        for d, (m, capacity) in enumerate(zip(p.memory, p.capacities, strict=True))
    ]
    return ["of one copy", "planned", "reserved", "free", "of the device"], rows


def _terms(p: Prediction) -> str:
    terms = sorted(p.memory[p.fullest].terms().items(), key=lambda term: -term[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in terms[:LARGEST] if size)


def _over_time(p: Prediction, timeline: Timeline) -> dict[str, Any]:
    """Return the activations that two devices keep over the step, in full micro-batches of one stage."""

    def curve(d: int) -> Points:
        alive = live_activations(timeline)[d]
        steps = [p for (_, before), (at, after) in pairwise(alive) for p in ((at, before), (at, after))]
        return [alive[0], *steps, (timeline.makespan, alive[-1][1])]

    emptiest = min(range(len(p.memory)), key=lambda d: p.memory[d].planned)
    curves = [(f"device {p.fullest}, the fullest", "first", curve(p.fullest))]
    if emptiest != p.fullest:
        curves.append((f"device {emptiest}", "second", curve(emptiest)))
    return chart("whole activations kept over the step, in micro-batches of a stage", "", *curves, axis="second")


def _links(p: Prediction, timeline: Timeline) -> tuple[list[str], list[list[object]]]:
    """Return the share of the step that each device computes, its collectives take, and its messages are under way."""
    graph, end_s = link(timeline.schedule), timeline.makespan
    sent = [0.0] * len(timeline.spans)
    for receiver, senders in enumerate(graph.preds):
        target = graph.tasks[receiver]
        for sender in senders:
            source, by = graph.tasks[sender], graph.device[sender]
            if by != graph.device[receiver] and not {source.kind, target.kind} & (BOOKKEEPING | NETWORK):
                sent[by] += latency(p.costs.comm, source.stage, target.stage)
    rows: list[list[object]] = []
    for d, lane in enumerate(timeline.spans):
        network = sum(s.end - s.start for s in lane if s.task.kind in NETWORK)
        compute = sum(s.end - s.start for s in lane if s.task.kind not in NETWORK)
        rows.append([f"device {d}", *(f"{share / end_s:.1%}" for share in (compute, network, sent[d]))])
    return ["", "computes", "collectives", "messages it sends"], rows


def _changes(p: Prediction, timeline: Timeline) -> Iterator[tuple[str, str, str]]:
    """Yield what the step would be with one cost changed, the largest gain first."""
    costs, stages = p.costs, p.costs.stages
    none = (0.0,) * stages

    def mean(values: tuple[float, ...]) -> tuple[float, ...]:
        return (sum(values) / stages,) * stages

    def scaled(values: tuple[float, ...], by: float) -> tuple[float, ...]:
        return tuple(value * by for value in values)

    def without_travel(table: CostTable) -> CostTable:
        travel = [a + b for a, b in zip(table.dispatch, table.combine, strict=True)]
        less: dict[str, Any] = {
            key: tuple(max(v - t, 0.0) for v, t in zip(getattr(table, key), travel, strict=True))
            for key in ("forward", "input_grad")
        }
        return replace(table, **less, dispatch=none, combine=none)

    network = ("all_reduce", "gather", "reduce_scatter")
    even = ("forward", "input_grad", "weight_grad", "recompute", "attention", "attention_grad")
    balanced: dict[str, Any] = {key: mean(getattr(costs, key)) for key in even}
    halved: dict[str, Any] = {key: scaled(getattr(costs, key), FASTER) for key in network}
    tried = {
        "every stage takes the same time": replace(costs, **balanced),
        "messages take no time": replace(costs, comm=0.0),
        "gradient sums take no time": replace(costs, all_reduce=none, reduce_scatter=none),
        "gathers of weights take no time": replace(costs, gather=none),
        "updates take no time": replace(costs, update=none),
        "a network twice as fast": replace(
            costs,
            comm=each_latency(costs.comm, lambda seconds: seconds * FASTER),
            **halved,
        ),
        "tokens reach experts in no time": without_travel(costs),
    }
    steps = {what: timeline_of(replace(p, costs=table)).makespan for what, table in tried.items() if table != costs}
    for what, step_s in sorted(steps.items(), key=lambda step: step[1]):
        yield what, seconds(step_s), f"{1 - step_s / timeline.makespan:.1%}"
