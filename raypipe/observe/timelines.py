"""Write timeline.json and trace.json of a run: the predicted and the measured step in the same format.

timeline.json also holds the run's newest steps with what devices waited for in them, from which ``raypipe explain``
says where their time went. A run that is still at work writes it anew now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raypipe.errors import RaypipeError, RequestError
from raypipe.files import strict_json, write_whole
from raypipe.observe.palette import LOOKS
from raypipe.plan.online.recorded_steps import FEWEST, RecordedSteps
from raypipe.schedule.deps import TaskGraph, link
from raypipe.schedule.forms.text import parse_task
from raypipe.schedule.ir import Task
from raypipe.schedule.kinds import BOOKKEEPING, NETWORK
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.simulate.timeline import Timeline, live_activations

FILE = "timeline.json"
EVERY_S = 10.0
"""Shortest time between two writes while a run is at work."""
SHARE = 0.005
"""Most of the driver's time that they take."""
Lanes = list[list[tuple[Task, float, float]]]
"""Per device: task, start and end in seconds."""


def save_timelines(
    directory: Path,
    predicted: Timeline | None,
    measured: Timeline | None,
    recorded: RecordedSteps | None = None,
    norm: NormPolicy = "none",
    trace: bool = True,
) -> None:
    """Write both steps, in seconds from the start of the step, and the measured one also as a trace.

    ``recorded`` are the newest steps, which did ``norm`` about the global gradient norm.
    """
    whole = {"predicted": _as_json(predicted), "measured": _as_json(measured)}
    if recorded is not None and recorded.steps:
        whole["recorded"] = {"norm": norm, **recorded.as_json()}
    write_whole(directory / FILE, strict_json(whole) + "\n")
    if measured is not None and trace:
        write_trace(measured, directory / "trace.json")


def _as_json(timeline: Timeline | None) -> dict[str, Any] | None:
    if timeline is None:
        return None
    return {
        "makespan": timeline.makespan,
        "bubble_ratio": timeline.bubble_ratio,
        "spans": [
            [{"task": str(task), "start": start, "end": end} for task, start, end in spans] for spans in timeline.spans
        ],
    }


def lanes_of(step: Any) -> Lanes | None:
    """Read ``predicted`` or ``measured`` of timeline.json; None if it is missing or damaged."""
    try:
        return [[(parse_task(s["task"]), float(s["start"]), float(s["end"])) for s in lane] for lane in step["spans"]]
    except (KeyError, TypeError, ValueError, RaypipeError):
        return None


class LiveTimelines:
    """Writes timeline.json while a run is at work, so rarely that it takes next to nothing of the driver's time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._next = 0.0

    def write(
        self,
        predicted: Timeline | None,
        measured: Callable[[], Timeline | None],
        recorded: RecordedSteps | None,
        norm: NormPolicy,
    ) -> None:
        """Write what there is, unless that was done a moment ago; ``measured`` is only called then."""
        began = time.monotonic()
        if began < self._next or recorded is None or len(recorded.steps) < FEWEST:
            return
        save_timelines(self.directory, predicted, measured(), recorded, norm, trace=False)
        self._next = began + max(EVERY_S, (time.monotonic() - began) / SHARE)


SECOND = 1e6
NETWORK_THREAD = 1000
"""Collectives of device d are on thread NETWORK_THREAD + d: they overlap compute, which slices of a thread must not."""


def trace(timeline: Timeline, graph: TaskGraph | None = None) -> dict[str, Any]:
    """Return the trace object; pass ``graph``, ``link(timeline.schedule)``, if it exists already."""
    schedule = timeline.schedule
    graph = link(schedule) if graph is None else graph
    events: list[dict[str, Any]] = [_name("process_name", 0, schedule.name)]
    network = {d for d, order in enumerate(schedule.orders) if any(t.kind in NETWORK for t in order)}
    for d in range(schedule.devices):
        events.append(_name("thread_name", d, f"device {d}"))
        events.append({**_name("thread_sort_index", d, ""), "args": {"sort_index": 2 * d}})
        if d in network:
            events.append(_name("thread_name", NETWORK_THREAD + d, f"device {d} network"))
            events.append({**_name("thread_sort_index", NETWORK_THREAD + d, ""), "args": {"sort_index": 2 * d + 1}})
    for d, spans in enumerate(timeline.spans):
        for task, start, end in spans:
            args = {"kind": task.kind, "stage": task.stage, "mb": list(task.mbs), "replica": task.replica}
            event = {
                "name": str(task),
                "cat": task.kind,
                "ph": "X",
                "pid": 0,
                "tid": d + NETWORK_THREAD * (task.kind in NETWORK),
                "ts": start * SECOND,
                "dur": (end - start) * SECOND,
                "args": args,
            }
            look = LOOKS[task.kind]
            events.append(event if look.trace is None else {**event, "cname": look.trace})
    events += _messages(timeline, graph)
    events += _live(timeline)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"makespan_s": timeline.makespan}}


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the trace as JSON.

    Raises:
        RequestError: the file cannot be written.
    """
    try:
        write_whole(path, strict_json(trace(timeline), separators=(",", ":")) + "\n")
    except OSError as error:
        raise RequestError(str(path), error.strerror or str(error), "choose a place that can be written") from error


def _name(what: str, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}


def _messages(timeline: Timeline, graph: TaskGraph) -> list[dict[str, Any]]:
    """Arrows from the end of the sender's slice to the start of the receiver's, for dependencies across devices."""
    times = [{task: (start, end) for task, start, end in spans} for spans in timeline.spans]
    events: list[dict[str, Any]] = []
    number = 0
    for receiver, preds in enumerate(graph.preds):
        target, to = graph.tasks[receiver], graph.device[receiver]
        if target.kind in BOOKKEEPING:
            continue
        for sender in preds:
            source, by = graph.tasks[sender], graph.device[sender]
            if by == to or source not in times[by] or target not in times[to]:
                continue
            start, end = times[by][source]
            # A flow binds to the slice that encloses its time, so it must start just before the sender's end.
            inside = end - min(1e-9, (end - start) / 2)
            number += 1
            common = {"name": f"{source} to {target}", "cat": "message", "id": number, "pid": 0}
            events.append({**common, "ph": "s", "tid": by, "ts": inside * SECOND})
            events.append({**common, "ph": "f", "bp": "e", "tid": to, "ts": times[to][target][0] * SECOND})
    return events


def _live(timeline: Timeline) -> list[dict[str, Any]]:
    """Counter events: live activations on each device after every change."""
    return [
        {"name": f"activations of device {d}", "ph": "C", "pid": 0, "ts": time * SECOND, "args": {"alive": alive}}
        for d, curve in enumerate(live_activations(timeline))
        for time, alive in curve
    ]
