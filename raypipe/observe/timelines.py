"""Write timeline.json and trace.json of a run: the predicted and the measured step in the same format.

timeline.json also holds the run's newest steps with what devices waited for in them, from which ``raypipe explain``
says where their time went. A run that is still at work writes it anew now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raypipe.atomic_write import write_whole
from raypipe.observe.draw.perfetto import write_trace
from raypipe.observe.strict_json import strict_json
from raypipe.plan.online.recorded_steps import FEWEST, RecordedSteps
from raypipe.schedule.lowering.norm_policy import NormPolicy
from raypipe.simulate.timeline import Timeline

FILE = "timeline.json"
EVERY_S = 10.0
"""Shortest time between two writes while a run is at work."""
SHARE = 0.005
"""Most of the driver's time that they take."""


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
