"""``parallel: auto``: measured, planned, and run through the real actors with the losses of plain PyTorch."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import ray

from raypipe.errors import SpecError
from raypipe.observe.run_log import EVENTS, METRICS, read_rows
from raypipe.plan.plan import load_plan
from raypipe.profiling import profile_and_plan as profile_and_plan
from raypipe.runtime.hosts.reserve import _idle, end_idle
from raypipe.train import execute, prepare_run
from tests.runtime.runs.plain_training import plain_losses
from tests.runtime.runs.test_exactness import STEPS, make_job


@pytest.mark.runs
def test_a_job_that_leaves_everything_to_the_planner(local_ray, text_folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(profile_and_plan, "connect_all", lambda *_: 2)
    monkeypatch.setattr(profile_and_plan, "BUDGET_S", 60.0)  # whatever else this machine does, all families are tried
    job = make_job(text_folder, {"auto": True})
    job = job.model_copy(update={"parallel": type(job.parallel).model_validate("auto")})
    said: list[str] = []
    prepared = prepare_run(job, tmp_path / "run", resume=False, say=said.append)
    end_idle()
    parallel = prepared.job.parallel
    assert not parallel.auto
    assert parallel.stages * parallel.replicas <= 2
    assert any(text.startswith("planned: ") for text in said)
    decision = next(e for e in read_rows(tmp_path / "run" / EVENTS) if e["event"] == "planned")
    assert decision["candidates"][0]["schedule"] == parallel.schedule
    assert {c["kind"] for c in decision["candidates"]} >= {"single device", "1f1b", "zb-v", "chimera"}
    saved = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert (saved["source"], saved["devices"]) == ("measured", 2)
    assert load_plan(tmp_path / "run" / "plan.json") == prepared.plan


@pytest.mark.runs
def test_workers_that_measured_train_the_job_exactly_and_are_released_where_it_cannot_begin(
    driver_here, text_folder: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(profile_and_plan, "connect_all", lambda *_: 2)
    free = ray.available_resources()["CPU"]
    job = make_job(text_folder, {"auto": True, "stages": 2})
    prepared = prepare_run(job, tmp_path / "run", resume=False)
    measured = [ray.get(actor.locate.remote()).pid for idle in _idle for actor in idle.actors.values()]
    execute(prepared, None, lambda: None)
    started = next(e for e in read_rows(tmp_path / "run" / EVENTS) if e["event"] == "started")
    assert len(measured) == 2
    assert {device["pid"] for device in started["devices"]} == set(measured)
    losses = [row["loss"] for row in read_rows(tmp_path / "run" / METRICS) if "loss" in row]
    assert losses == pytest.approx(plain_losses(job, tmp_path / "run" / "data", STEPS), abs=1e-9, rel=0)
    # It goes on with the plan it has, whatever a new measurement would say; and says nothing of measuring.
    more = job.model_copy(update={"train": job.train.model_copy(update={"steps": STEPS + 1})})
    assert prepare_run(more, tmp_path / "run", resume=True, say=pytest.fail).plan == prepared.plan

    def fails(*_: object) -> None:
        assert _idle
        raise RuntimeError("after planning")

    monkeypatch.setattr("raypipe.train.units_of", fails)
    with pytest.raises(RuntimeError, match="after planning"):
        prepare_run(job, tmp_path / "other", resume=False)
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU", 0.0) < free:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_divided_layers_are_refused_before_anything_is_measured(text_folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(profile_and_plan, "connect_all", lambda *_: pytest.fail("connected"))
    job = make_job(text_folder, {"auto": True, "tensor": 2})
    job = job.model_copy(update={"parallel": type(job.parallel).model_validate({"auto": True, "tensor": 2})})
    with pytest.raises(SpecError, match="cannot be measured"):
        profile_and_plan.profile_this_machine(job, None, None, None, print)
