"""``raypipe serve`` as a command: it starts Ray and the workers, answers, and ends on SIGTERM."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from raypipe.job import load_job
from raypipe.observe.run_record import read_run
from tests.job_files import write_job
from tests.service.serving import serving

pytestmark = [pytest.mark.runs, pytest.mark.own_ray]


def post(url: str, verb: str, **body: Any) -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/api/v1/{verb}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_the_command_serves_until_it_is_ended(tmp_path: Path, text_folder: Path) -> None:
    job = write_job(tmp_path / "job.json", text_folder, {"stages": 1, "microbatch": 2}, steps=1)
    with serving(job, tmp_path, os.environ) as server:
        session = post(server.url, "create_session")["session_id"]
        made = post(server.url, "create_model", session_id=session, model_seq_id=0, base_model="small")
        assert post(server.url, "retrieve_future", request_id=made["request_id"])["model_id"] == made["model_id"]
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(server.url, "create_model", session_id=session, model_seq_id=1, base_model="other")
    run = read_run(server.run)
    assert (run.state(), run.planned_steps) == ("interrupted", None)
    assert run.parallel["stages"] == 1


def test_the_planner_chooses_what_sessions_have() -> None:
    """Keys that the job gives stay, and are refused by name later."""
    pytest.importorskip("fastapi")
    from raypipe.service.actor import SERVED, of_calls

    quickstart = Path(__file__).parents[2] / "jobs" / "quickstart.yaml"
    asked = of_calls(load_job(quickstart)).parallel
    assert asked.auto
    assert {key: asked.given[key] for key in SERVED} == SERVED
    assert of_calls(load_job(quickstart, ["parallel.tensor=2"])).parallel.tensor == 2
