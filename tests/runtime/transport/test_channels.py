"""The same properties for every transport of the registry: scenarios.py in two processes per kind of channel."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from tests.exhaustive import crossed
from tests.runtime.transport.kinds import BETWEEN_CPUS, IN_ACTORS
from tests.runtime.transport.scenarios import DEATHS, NAMES

IN_PROCESSES = [kind for kind in BETWEEN_CPUS if kind not in IN_ACTORS]
ROOT = Path(__file__).parents[3]
SCENARIOS = "tests.runtime.transport.scenarios"


pytestmark = pytest.mark.slow
"""Two processes import torch for each kind."""


def pair(kind: str, what: str) -> list[dict[str, str] | str]:
    """What the two ranks report; the error output of one that reports nothing."""
    with tempfile.TemporaryDirectory() as folder:
        return joined_pair(kind, what, f"{folder}/store")


def joined_pair(kind: str, what: str, store: str) -> list[dict[str, str] | str]:
    """The same, where the two ranks find each other by a file."""
    command = [sys.executable, "-m", SCENARIOS, kind]
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    ranks = [
        subprocess.Popen(
            [*command, str(rank), store, run_id, what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
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


@pytest.fixture(scope="module", params=IN_PROCESSES)
def outcomes(request: pytest.FixtureRequest) -> list[dict[str, str] | str]:
    return pair(request.param, "all")


@pytest.mark.parametrize("name", NAMES)
def test_channel(outcomes: list[dict[str, str] | str], name: str) -> None:
    for rank, report in enumerate(outcomes):
        assert isinstance(report, dict), f"rank {rank} died:\n{report}"
        assert report[name] == "ok", f"rank {rank}:\n{report[name]}"


@pytest.mark.parametrize(("kind", "death"), crossed(IN_PROCESSES, list(DEATHS)))
def test_death_of_the_peer_is_noticed(kind: str, death: str) -> None:
    survivor = pair(kind, death)[0]
    assert survivor == {death: "ok"}, survivor
