"""Steps of real runs, with real gathers, sums and samples, are taken apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.explain.measured import Measured
from raypipe.explain.replay import Replay
from raypipe.observe.explained_run import explained
from raypipe.observe.timelines import save_timelines
from raypipe.plan.online.recorded_steps import recorded_from_json
from tests.exhaustive import exhaustive
from tests.runtime.runs.small_runs import Pool, drive, small_job

PLANS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b", "stages": 2},
    "chimera": {"schedule": "chimera", "stages": 2},
    "zero3": {"schedule": "1f1b", "stages": 1, "replicas": 2, "shard": "zero3"},
    "2bw": {"schedule": "pipedream-2bw", "stages": 2},
}


@pytest.mark.slow
@pytest.mark.runs
@pytest.mark.parametrize("name", ["zero3", "2bw", *exhaustive("1f1b", "chimera")])
def test_a_run_is_explained(name: str, stage_pool: Pool, text_folder: Path, tmp_path: Path) -> None:
    done = drive(small_job(text_folder, PLANS[name], steps=7, checkpoint_every=0, eval_every=0), stage_pool, tmp_path)
    recorded = done.driver.clock.recorded
    assert recorded is not None
    assert len(recorded.steps) == (5 if name == "2bw" else 7)  # one step fills its pipeline, and one drains it
    save_timelines(tmp_path, None, None, recorded, done.driver.norm)
    of = Measured(schedule=recorded.schedule, steps=tuple(recorded.steps), norm=done.driver.norm)
    replay = Replay(of)
    if name != "zero3":  # collectives of shards that ran beside tasks are not replayed exactly: docs/guides/why-slow.md
        assert replay.step_s() == pytest.approx(replay.measured_s, rel=0.02)
    why = explained(of).why
    assert 0 < why.ideal_s < why.step_s
    assert sum(c.seconds for c in why.causes) == pytest.approx(why.step_s - why.ideal_s, rel=1e-6)
    if name == "zero3":
        assert any(step.waits.gather_s[0] for step in recorded.steps)
    assert recorded_from_json(recorded.as_json(), "x").schedule == recorded.schedule
