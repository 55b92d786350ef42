"""torch's profiler over some steps of a run: a trace per worker, with the schedule's tasks by name."""

from __future__ import annotations

import gzip
import json

import pytest

from raypipe.errors import SpecError
from tests.runtime.runs.small_runs import drive, small_job


@pytest.mark.runs
def test_each_worker_writes_a_trace_of_the_window_alone(text_folder, stage_pool, tmp_path) -> None:
    parallel = {"schedule": "1f1b", "stages": 2}
    plain = drive(small_job(text_folder, parallel), stage_pool, tmp_path / "plain")
    job = small_job(text_folder, parallel, profile={"start_step": 2, "steps": 2})
    done = drive(job, stage_pool, tmp_path / "profiled")
    assert done.losses == plain.losses
    for rank in (0, 1):
        path = tmp_path / "profiled" / "profiles" / f"steps-2-3-rank-{rank}.json.gz"
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        for mb in range(4):
            assert names.count(f"{rank}F{mb}") == 2
        assert any(event["name"] == "aten::mm" or event["name"] == "aten::addmm" for event in events)
    assert len(list((tmp_path / "profiled" / "profiles").iterdir())) == 2


def test_a_window_after_the_last_step_is_refused(text_folder) -> None:
    with pytest.raises(SpecError, match=r"train.profile.start_step: 10, but the run has 4 steps"):
        small_job(text_folder, {"stages": 1}, profile={})
