"""The closed loop: measured costs lead to a better order, and swapping it in changes no loss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from raypipe.data import prepare
from raypipe.observe.run_log import EVENTS, METRICS, RunLog, read_rows
from raypipe.plan.plan import load_plan
from raypipe.runtime import replan
from raypipe.runtime.driver import Driver
from raypipe.runtime.replan import Replanner, better_plan
from raypipe.schedule.costs import CostTable
from raypipe.train import make_plan, prepare_run
from tests.runtime.plain_training import plain_losses
from tests.runtime.test_exactness import make_job

STEPS = 24
AUTO = {"schedule": "auto", "stages": 4, "memory_limit": 4}


def uneven(stages: int) -> CostTable:
    """A last stage that takes far longer than its operations let expect, and slow messages."""
    costs = CostTable.even(stages, 1.0, 1.2, 0.8, comm=0.4)
    return replace(costs, forward=(*costs.forward[:-1], 1.9), weight_grad=(*costs.weight_grad[:-1], 0.2))


def test_a_better_order_is_found_on_measured_costs(text_folder: Path) -> None:
    job = make_job(text_folder, AUTO)
    plan = make_plan(job)
    swap = better_plan(plan, job.train.batch, uneven(4))
    assert 0 < swap.gain < 0.5
    assert swap.plan.cut == plan.cut
    again = better_plan(swap.plan, job.train.batch, uneven(4))
    assert again.gain >= 0  # it begins from the order it has


class Eager(Replanner):
    """Finds its order before the next step begins, however fast the steps are."""

    def take(self):
        if self._thread is not None:
            self._thread.join()
        return super().take()


@pytest.mark.runs
def test_a_swap_between_two_steps_changes_no_loss(stage_pool, text_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(replan, "THRESHOLD", -1.0)  # swap whatever the gain
    monkeypatch.setattr(replan, "BUDGET_S", 0.3)
    job = make_job(text_folder, AUTO, steps=STEPS)
    prepare(job.data, job.model.sequence, tmp_path / "data")
    expected = plain_losses(job, tmp_path / "data", STEPS)
    log = RunLog(tmp_path)
    driver = Driver(job, make_plan(job), tmp_path, log, lambda *_: None)
    driver.replanner = Eager(driver.plan, job.train.batch)
    before = driver.schedule
    driver.run(stage_pool(4), None, 0)
    log.close()
    losses = [row["loss"] for row in read_rows(tmp_path / METRICS) if "loss" in row]
    assert losses == pytest.approx(expected, abs=1e-9, rel=0)
    events = read_rows(tmp_path / EVENTS)
    swaps = [e for e in events if e["event"] == "replanned"]
    assert len(swaps) == 1
    assert 7 < swaps[0]["step"] < STEPS
    assert [e for e in events if e["event"] == "realised"]
    assert driver.schedule.orders != before.orders
    assert load_plan(tmp_path / "plan.json").order == driver.plan.order
    longer = job.model_copy(update={"train": job.train.model_copy(update={"steps": STEPS + 8})})
    assert prepare_run(longer, tmp_path, resume=True).plan == driver.plan  # a resumed run goes on with it
    assert json.loads((tmp_path / "plan.json").read_text())["parallel"]["schedule"] == "auto"
