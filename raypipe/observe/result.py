"""The output of ``raypipe schedule --json``: the schedule, its costs, the times of all tasks, and summary figures."""

from __future__ import annotations

from typing import Any

from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.forms.json_form import to_json
from raypipe.schedule.versions import weight_versions
from raypipe.simulate.lower_bound import lower_bound
from raypipe.simulate.period import period
from raypipe.simulate.timeline import Timeline, critical_path


def result(timeline: Timeline, costs: CostTable) -> dict[str, Any]:
    """Return the JSON object; ``schedule.forms.json_form.from_json`` reads schedule and costs back from it.

    Times are in the unit of ``costs``, activations in units of one stage and micro-batch.
    """
    schedule = timeline.schedule
    graph = link(schedule)
    path = critical_path(timeline, graph)
    return {
        **to_json(schedule, costs, timeline.spans),
        "makespan": timeline.makespan,
        "span": list(timeline.device_spans),
        "period": period(schedule, costs, graph),
        "bubble_ratio": timeline.bubble_ratio,
        "peak_activations": list(timeline.peak_activations),
        "weight_versions": list(weight_versions(schedule)),
        "lower_bound": lower_bound(schedule, costs),
        "critical_path": [str(span.task) for span in path.spans],
        "critical_forwards": path.forwards,
        "critical_backwards": path.backwards,
    }
