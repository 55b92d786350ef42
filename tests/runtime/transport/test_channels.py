"""The same properties for every implementation: scenarios.py in two processes per kind of channel."""

from __future__ import annotations

import json
import runpy
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("scenarios.py")
NAMES = runpy.run_path(str(SCRIPT))["NAMES"]


pytestmark = pytest.mark.slow
"""Two processes import torch for each kind."""


def pair(kind: str, what: str) -> list[dict[str, str] | str]:
    """What the two ranks report; the error output of one that reports nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(SCRIPT), kind]
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(port), run_id, what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    reports: list[dict[str, str] | str] = []
    for process in ranks:
        try:
            out, err = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        reports.append(json.loads(out) if out else err[-3000:])
    return reports


@pytest.fixture(scope="module", params=["shm", "gloo"])
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, str] | str]:
    return pair(request.param, "all")


@pytest.mark.parametrize("name", NAMES)
def test_channel(outcomes: list[dict[str, str] | str], name: str) -> None:
    for rank, report in enumerate(outcomes):
        assert isinstance(report, dict), f"rank {rank} died:\n{report}"
        assert report[name] == "ok", f"rank {rank}:\n{report[name]}"


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_death_of_the_peer_is_noticed_at_once(kind: str) -> None:
    survivor = pair(kind, "dies")[0]
    assert survivor == {"dies": "ok"}, survivor
