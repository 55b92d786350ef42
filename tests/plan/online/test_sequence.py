"""One controller after the other, and none of them can end training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from raypipe.errors import ScheduleError
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.job.requested_schedule import layers_to_recompute
from raypipe.observe.run_log import EVENTS, read_rows
from raypipe.plan.online import sequence
from raypipe.plan.online.better_order import running_of
from raypipe.plan.online.controller import Event, MeasuredStep, StepMemory
from raypipe.plan.online.measured_steps import StepClock
from raypipe.plan.online.replan import Replanner
from raypipe.plan.online.sequence import WATCHED, ControllerSequence, Guard, Raiser
from raypipe.plan.plan import Plan
from raypipe.schedule.costs import CostTable
from tests.runtime.runs.small_runs import drive, small_job

BATCH = 8
PREDICTION = SimpleNamespace(step_s=2.0, bubble_ratio=0.25, costs=CostTable.even(2))


class Clock:
    """Predicts after ``steps`` steps, once."""

    recorded = None

    def __init__(self, steps: int = 1000) -> None:
        self.left = steps

    def so_far(self) -> CostTable:
        return CostTable.even(2, recompute=1.0)

    def predict(self, at_end: bool = False) -> Any:
        self.left -= 1
        return PREDICTION if self.left == 0 or at_end else None


def begin(told: list[str], **parallel: Any) -> ControllerSequence:
    spec = ParallelSpec.model_validate({"schedule": "zb-h1", "stages": 2, **parallel})
    plan = Plan.of(spec, ((0, 1), (2, 3)), BATCH)
    return ControllerSequence(running_of(plan, BATCH, clips=False), BATCH, False, told.append)


def step(loop: ControllerSequence, clock: Clock) -> list[Event]:
    """One step with 10 MiB on each device; what is computed again takes 1 MiB a layer and micro-batch."""
    plan = loop._present.plan
    again = layers_to_recompute(plan.parallel, plan.cut) or frozenset()
    of_stage = [sum(i in again for i in layers) for layers in plan.cut]
    memory = [StepMemory(10 << 20, {stage: n << 20} if n else {}) for stage, n in enumerate(of_stage)]
    loop.observe(MeasuredStep(1.0, memory, cast("StepClock", clock)))
    return loop.drain()


SEARCH = {"schedule": "1f1b", "recompute": "stage-aware", "memory_cap_mb": 1e6}


def test_the_share_is_found_first_and_then_it_is_planned_again() -> None:
    told: list[str] = []
    loop = begin(told, **SEARCH, replan=True)
    assert loop.measures_memory
    assert loop.proven.parallel.alphas == 0.0  # a restart keeps nothing before it is known to fit
    tried = []
    for _ in range(20):
        assert step(loop, Clock()) == [], "a decision is told when its plan is taken up"
        target = loop.next_plan()
        events = loop.drain()
        assert bool(events) == (target is not None)
        if target is not None:
            tried.append((target, loop.measures_memory))
            assert [event.name for event in events] == ["recompute"]
        if not isinstance(loop._active, Raiser):
            break
    assert told == []
    assert [measures for _, measures in tried] == [True, False]
    assert tried[0][0].plan == tried[1][0].plan, "every layer fits; then the same again, without measuring"
    assert isinstance(loop._active, Replanner)
    assert loop._active.present is tried[-1][0]
    assert loop.proven == tried[-1][0].plan
    assert not loop.done


def test_costs_reach_the_controller_with_the_prediction() -> None:
    loop, clock = begin([], replan=True), Clock(steps=3)
    replanner = cast("Replanner", loop._active)
    assert [step(loop, clock) for _ in range(2)] == [[], []]
    assert replanner.state == "measuring"
    assert step(loop, clock) == [Event("predicted", {"step_s": 2.0, "bubble_ratio": 0.25})]
    assert replanner.state == "searching"


def test_a_plan_that_nothing_changes_is_predicted_all_the_same() -> None:
    loop = begin([])
    assert loop.done
    assert not loop.measures_memory
    assert step(loop, Clock()) == []
    assert loop.next_plan() is None
    loop.finish(cast("StepClock", Clock()))
    assert [event.name for event in loop.drain()] == ["predicted"]


@pytest.mark.parametrize("method", ["observe", "next_plan", "drain"])
def test_a_controller_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """One notice, no further plan, and a restart begins with what was proven before."""

    class Broken(Replanner):
        calls = 0

    def fail(self: Broken, *_: object) -> None:
        Broken.calls += 1
        raise ZeroDivisionError("whatever it meets")

    told: list[str] = []
    monkeypatch.setattr(sequence, "Replanner", Broken)
    loop = begin(told, replan=True)
    before = loop.proven
    monkeypatch.setattr(Broken, method, fail)
    for _ in range(3):
        assert step(loop, Clock()) == []
        assert loop.next_plan() is None
    assert Broken.calls == 1
    assert [text.partition(" failed")[0] for text in told] == ["replanning"]
    assert told[0].endswith("ZeroDivisionError: whatever it meets")
    assert loop.proven is before


def test_no_search_follows_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last share may not fit: nothing is built on it, and a restart keeps what did."""
    told: list[str] = []
    monkeypatch.setattr(Raiser, "_gain", lambda *_: 1 / 0)
    loop = begin(told, **SEARCH, replan=True)
    for _ in range(3 * WATCHED):
        step(loop, Clock())
        assert loop.next_plan() is None
    assert [text.partition(" failed")[0] for text in told] == ["the search for parallel.alphas"]
    assert isinstance(loop._active, Raiser)
    assert loop.proven.parallel.alphas == 0.0


# What only looks at training cannot end it.


def test_a_failure_is_noted_once_and_the_rest_goes_on() -> None:
    told: list[str] = []
    guard = Guard(told.append)
    calls = []

    def fails(value: int) -> int:
        calls.append(value)
        raise ScheduleError("", "comm is -999.99\nand more", "times are finite and not negative")

    assert guard("the prediction", fails, 1) is None
    assert guard("the prediction", fails, 2) is None
    assert guard("something else", lambda: 3) == 3
    assert calls == [1]
    (notice,) = told
    assert notice.startswith("the prediction failed and is disabled")
    assert notice.endswith("ScheduleError: comm is -999.99")


@pytest.mark.runs
def test_training_survives_its_prediction(stage_pool, text_folder, tmp_path, monkeypatch) -> None:
    job = small_job(text_folder, {"schedule": "1f1b", "stages": 2}, steps=12)
    undisturbed = drive(job, stage_pool, tmp_path / "undisturbed")

    def broken(self: StepClock, at_end: bool = False) -> None:
        raise ZeroDivisionError("whatever it meets")

    monkeypatch.setattr(StepClock, "predict", broken)
    done = drive(job, stage_pool, tmp_path / "run")
    assert done.losses == undisturbed.losses
    notices = [row for row in read_rows(tmp_path / "run" / EVENTS) if row["event"] == "notice"]
    assert len(notices) == 1
    assert "the prediction" in notices[0]["message"]
    assert not list((tmp_path / "run").glob(".shared-*"))
