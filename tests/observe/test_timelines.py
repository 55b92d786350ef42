"""timeline.json holds the predicted and the measured step in one form; trace.json the measured one."""

from __future__ import annotations

import json

import pytest

from raypipe.observe.timelines import FILE, save_timelines


def test_both_steps_side_by_side(timeline, tmp_path) -> None:
    predicted, measured = timeline("1f1b"), timeline("1f1b", comm=0.5)
    save_timelines(tmp_path, predicted, measured)
    both = json.loads((tmp_path / FILE).read_text())
    assert set(both) == {"predicted", "measured"}
    for saved, step in ((both["predicted"], predicted), (both["measured"], measured)):
        assert saved["makespan"] == step.makespan
        assert saved["bubble_ratio"] == pytest.approx(step.bubble_ratio)
        assert [[(s["task"], s["start"], s["end"]) for s in spans] for spans in saved["spans"]] == [
            [(str(task), start, end) for task, start, end in spans] for spans in step.spans
        ]
    assert both["measured"]["makespan"] > both["predicted"]["makespan"]


def test_the_trace_is_the_measured_step(timeline, tmp_path) -> None:
    measured = timeline("gpipe", comm=0.25)
    save_timelines(tmp_path, timeline("gpipe"), measured)
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {str(task) for task in measured.schedule.tasks()} <= names


def test_a_run_too_short_to_predict(timeline, tmp_path) -> None:
    save_timelines(tmp_path, None, timeline("1f1b"))
    assert json.loads((tmp_path / FILE).read_text())["predicted"] is None
    assert (tmp_path / "trace.json").exists()


def test_a_run_of_no_steps(tmp_path) -> None:
    save_timelines(tmp_path, None, None)
    assert json.loads((tmp_path / FILE).read_text()) == {"predicted": None, "measured": None}
    assert not (tmp_path / "trace.json").exists()
