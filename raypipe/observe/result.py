"""What ``raypipe schedule --json`` reports: the schedule, its costs, every task's time, and the figures."""

from __future__ import annotations

from typing import Any

from raypipe.schedule.costs import CostTable
from raypipe.schedule.json_form import to_json
from raypipe.schedule.versions import weight_versions
from raypipe.simulate.timeline import Timeline


def result(timeline: Timeline, costs: CostTable) -> dict[str, Any]:
    """The JSON object; ``schedule.json_form.from_json`` reads schedule and costs back from it.

    Times are in the unit of ``costs``, activations in those of one stage for one micro-batch.
    """
    return {
        **to_json(timeline.schedule, costs, timeline.spans),
        "makespan": timeline.makespan,
        "span": list(timeline.device_spans),
        "bubble_ratio": timeline.bubble_ratio,
        "peak_activations": list(timeline.peak_activations),
        "weight_versions": list(weight_versions(timeline.schedule)),
    }
