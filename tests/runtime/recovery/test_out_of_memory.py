"""A device that runs out of memory gives the next attempt a plan that needs less; other failures leave the plan."""

from __future__ import annotations

from pathlib import Path

from ray.exceptions import ActorDiedError

from raypipe.data import declared_fields, prepare_data
from raypipe.errors import DeviceError
from raypipe.models import build_model
from raypipe.observe.run_log import EVENTS, RunLog, event_sentences, read_rows
from raypipe.plan.plan import load_plan
from raypipe.runtime.recovery.failure import plan_with_less, ran_out
from raypipe.train import make_plan
from tests.runtime.runs.small_runs import small_job

FULL = DeviceError("stage 0 · device 0, F(0,0) of step 3", "OutOfMemoryError: CUDA out of memory", "", "", "memory")


def test_what_is_taken_for_it() -> None:
    assert ran_out(FULL)
    assert not ran_out(DeviceError("stage 0", "IndexError: no such row"))
    assert not ran_out(ActorDiedError())
    assert not ran_out(MemoryError())  # of the driver, whose memory no plan changes


def test_the_next_attempt_needs_less_and_the_last_one_says_that_nothing_does(text_folder: Path, tmp_path: Path) -> None:
    job = small_job(text_folder, {"schedule": "1f1b", "stages": 2})
    prepare_data(job, build_model(job, declared_fields(job.data)).task, tmp_path / "data")
    make_plan(job).save(tmp_path / "plan.json")
    log = RunLog(tmp_path)
    for _ in range(3):
        plan_with_less(job, tmp_path, log, FULL)
    parallel = load_plan(tmp_path / "plan.json").parallel
    assert (parallel.recompute, parallel.microbatch) == ("full", 1)
    events = read_rows(tmp_path / EVENTS)
    assert [e["event"] for e in events] == ["out_of_memory", "out_of_memory", "notice"]
    said = [line for e in events for line in event_sentences(e)]
    assert said[0] == "out of memory, so it goes on with recompute: full instead of none"
    assert said[1] == "out of memory, so it goes on with micro-batches of 1 instead of 2"
    assert "no plan for these devices needs less" in said[2]
