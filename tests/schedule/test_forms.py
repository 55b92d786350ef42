"""Every named schedule survives the text and the JSON form."""

import json

import pytest

from raypipe.schedule import SCHEDULES, Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.forms.json_form import from_json, to_json
from raypipe.schedule.forms.text import from_text, to_text
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate

CASES = [(name, {}) for name in SCHEDULES if name != "auto"] + [
    ("chimera", {"concat": "doubling"}), ("chimera", {"concat": "halving"}), ("interleaved-1f1b", {"chunks": 2}),
    ("zeropp", {"chunks": 2, "unit": 3}), ("modulo", {"chunks": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), CASES)
def test_reads_back(name, options):
    shape = Shape(devices=4, microbatches=8, **options)
    costs = CostTable.even(stages_of(name, shape), 1.0, 1.5, 0.5, recompute=1.0, comm=0.25)
    schedule = generate(name, shape, costs)
    assert from_text(to_text(schedule)) == schedule
    timeline = simulate(schedule, costs)
    found = json.loads(json.dumps(to_json(schedule, costs, timeline.spans)))
    again, same_costs = from_json(found)
    assert (again, same_costs) == (schedule, costs)
    verify(again)
    assert simulate(again, same_costs).spans == timeline.spans
    for order in found["orders"]:  # what a reader computes from the file alone is what was simulated
        for entry in order:
            stated = entry.get("dur", found["durations"][entry["kind"]])
            length = stated[entry["stage"]] if isinstance(stated, list) else stated
            assert entry["end"] - entry["start"] == pytest.approx(length)
