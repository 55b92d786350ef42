"""``raypipe explain`` reads run directories: those of finished runs, of runs still at work, and what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypipe.cli import run as command
from raypipe.observe.report import report_page
from raypipe.observe.run_log import RunLog
from raypipe.observe.run_record import read_run
from raypipe.observe.timelines import LiveTimelines, save_timelines
from raypipe.plan.online.measured_steps import as_run
from raypipe.plan.online.recorded_steps import RecordedSteps
from raypipe.plan.plan import build_schedule
from raypipe.schedule.costs import CostTable
from raypipe.simulate.engine import simulate
from tests.explain.simulated_steps import run_steps, uneven
from tests.explain.test_changes import plan


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run that is still at work, whose second stage is too long."""
    log = RunLog(tmp_path)
    log.event("run", resume=False, devices=4, cores=2)
    of = plan(((0, 1), (2, 3, 4, 5), (6,), (7,)))
    of.save(tmp_path / "plan.json")
    (tmp_path / "job.json").write_text(json.dumps({"name": "mine", "train": {"batch": 32}}))
    save_timelines(tmp_path, None, None, recorded(of), "wait")
    return tmp_path


def recorded(of) -> RecordedSteps:
    schedule = as_run(build_schedule(of, 32))
    result = RecordedSteps(schedule)
    for step in run_steps(schedule, uneven([0.2, 0.4, 0.1, 0.1])):
        result.add(step, follows=True)
    return result


def test_the_json_is_as_promised(directory: Path, capsys) -> None:
    assert command(["explain", str(directory), "--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 1
    result = json.loads(out[0])
    lost = result["step_s"] - result["ideal_s"]
    assert sum(cause["seconds"] for cause in result["causes"]) == pytest.approx(lost, rel=0.01)
    assert {"cause", "device", "seconds", "what_if_step_s"} <= result["causes"][0].keys()
    assert (result["causes"][0]["cause"], result["causes"][0]["device"]) == ("imbalance", 1)
    assert result["ideal_s"] == pytest.approx(0.2 * 3 * 8, rel=1e-5)
    assert result["best_change"]["predicted_step_s"] == pytest.approx(6.6, rel=1e-5)
    assert result["best_change"]["gain"] == pytest.approx(1 - 6.6 / result["step_s"], rel=1e-4)
    assert result["steps"] == [2, 3]


def test_the_json_goes_to_a_file_too(directory: Path, tmp_path: Path, capsys) -> None:
    assert command(["explain", str(directory), "--json", str(tmp_path / "why.json")]) == 0
    assert json.loads((tmp_path / "why.json").read_text()) == json.loads(capsys.readouterr().out)


def test_the_table_names_the_cause_the_device_and_the_change(directory: Path, capsys) -> None:
    assert command(["explain", str(directory)]) == 0
    out = capsys.readouterr().out
    assert "imbalance" in out
    assert "device 1" in out
    assert "Best change: another cut" in out
    heat = next(line for line in out.splitlines() if line.startswith("       1  "))
    assert "@@@" in heat


@pytest.mark.slow
def test_the_plot_marks_the_critical_path(directory: Path, tmp_path: Path) -> None:
    assert command(["explain", str(directory), "--plot", str(tmp_path / "why.svg")]) == 0
    assert "critical path" in (tmp_path / "why.svg").read_text()


def test_the_report_has_the_same_causes(directory: Path) -> None:
    page = report_page(read_run(directory))
    assert "Where the time goes" in page
    assert "imbalance" in page
    assert "another cut" in page


def test_a_run_that_has_recorded_nothing_yet(tmp_path: Path, capsys) -> None:
    log = RunLog(tmp_path)
    log.event("run", resume=False, devices=4, cores=2)
    assert command(["explain", str(tmp_path)]) == 2
    assert "no recorded steps" in capsys.readouterr().err
    assert "Nothing to explain" in report_page(read_run(tmp_path))


@pytest.mark.parametrize(
    "recorded",
    [
        {}, [], 7, {"schedule": "x", "steps": []}, {"schedule": "device 0: 0F0 0BW0\n", "steps": []},
        {"schedule": "device 0: 0F0 0BW0\n", "steps": [{"step": 1, "devices": [[[0, 1]]]}]},
        {"schedule": "device 0: 0F0 0BW0\n", "steps": [{"step": 1, "devices": [[[0, 1], [1, "x"]]]}]},
        {"schedule": "device 0: 0F0 0BW0\n", "norm": "x", "steps": [{"step": 1, "devices": [[[0, 1], [1, 2]]]}]},
    ],
)  # fmt: skip
def test_damaged_recorded_steps_are_one_message(recorded: object, tmp_path: Path, capsys) -> None:
    log = RunLog(tmp_path)
    log.event("run", resume=False, devices=1, cores=2)
    (tmp_path / "timeline.json").write_text(json.dumps({"recorded": recorded}))
    assert command(["explain", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "fix:" in err
    assert "Traceback" not in err


def test_a_folder_that_is_no_run(tmp_path: Path, capsys) -> None:
    assert command(["explain", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert command(["explain", str(tmp_path / "none")]) == 2


def test_a_run_at_work_writes_what_there_is_now_and_then(tmp_path: Path) -> None:
    live, steps = LiveTimelines(tmp_path), recorded(plan(((0,), (1,), (2,), (3,))))
    calls = []
    live.write(None, lambda: calls.append(1), steps, "none")
    live.write(None, lambda: calls.append(1), steps, "none")
    assert calls == [1]
    assert (tmp_path / "timeline.json").is_file()


def test_what_is_written_is_read_back_as_it_was(tmp_path: Path) -> None:
    of = plan(((0,), (1,), (2,), (3,)))
    steps = recorded(of)
    predicted = simulate(steps.schedule, CostTable.even(4, 0.1, 0.1, 0.1))
    save_timelines(tmp_path, predicted, None, steps, "optimistic")
    from raypipe.plan.online.recorded_steps import recorded_from_json

    value = json.loads((tmp_path / "timeline.json").read_text())["recorded"]
    again = recorded_from_json(value, "x")
    assert value["norm"] == "optimistic"
    assert again.schedule == steps.schedule
    for one, other in zip(again.steps, steps.steps, strict=True):
        shift = one.times[0][0, 0] - other.times[0][0, 0]
        assert all(a == pytest.approx(b + shift, abs=1e-6) for a, b in zip(one.times, other.times, strict=True))
