"""Write timeline.json and trace.json of a run: the predicted and the measured step in the same format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raypipe.atomic_write import write_whole
from raypipe.observe.draw.perfetto import write_trace
from raypipe.observe.strict_json import strict_json
from raypipe.simulate.timeline import Timeline

FILE = "timeline.json"


def save_timelines(directory: Path, predicted: Timeline | None, measured: Timeline | None) -> None:
    """Write both steps, in seconds from the start of the step, and the measured one also as a trace."""
    both = {"predicted": _as_json(predicted), "measured": _as_json(measured)}
    write_whole(directory / FILE, strict_json(both) + "\n")
    if measured is not None:
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
