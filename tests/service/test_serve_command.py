"""``raypipe serve`` as a command: it starts Ray and the workers, answers, and ends on SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from raypipe.job import load_job
from tests.job_files import write_job

pytestmark = [pytest.mark.runs, pytest.mark.own_ray]


def post(url: str, verb: str, **body: Any) -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/api/v1/{verb}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_the_command_serves_until_it_is_ended(tmp_path: Path, text_folder: Path) -> None:
    job = write_job(tmp_path / "job.json", text_folder, {"stages": 1, "microbatch": 2}, steps=1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tests.forked_workers.command",
        "serve",
        str(job),
        "--port",
        str(port),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    log = tmp_path / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, cwd=Path(__file__).parents[2], env=dict(os.environ))
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while f"serving small at {url}" not in log.read_text():
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        time.sleep(0.5)
        session = post(url, "create_session")["session_id"]
        made = post(url, "create_model", session_id=session, model_seq_id=0, base_model="small")
        assert post(url, "retrieve_future", request_id=made["request_id"])["model_id"] == made["model_id"]
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(url, "create_model", session_id=session, model_seq_id=1, base_model="other")
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 143, log.read_text()
    assert (tmp_path / "run" / "plan.json").is_file()


def test_the_planner_chooses_what_sessions_have() -> None:
    """Keys that the job gives stay, and are refused by name later."""
    pytest.importorskip("fastapi")
    from raypipe.service.serve import SERVED, of_calls

    quickstart = Path(__file__).parents[2] / "jobs" / "quickstart.yaml"
    asked = of_calls(load_job(quickstart)).parallel
    assert asked.auto
    assert {key: asked.given[key] for key in SERVED} == SERVED
    assert of_calls(load_job(quickstart, ["parallel.tensor=2"])).parallel.tensor == 2
