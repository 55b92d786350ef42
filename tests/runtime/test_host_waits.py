"""The host never waits for the GPU, inside a step or between steps: counted on a fake GPU that computes on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.exhaustive import exhaustive
from tests.runtime.fake_gpu import SETUP
from tests.runtime.host_waits import CASES, STEADY, STEPS

pytestmark = pytest.mark.skipif(SETUP is None, reason="this torch lets no device be written in Python")
DAILY = ("always-clipped", "split-backward", "recomputed-in-pairs")
ROOT = Path(__file__).parents[2]


def run(case: str) -> Any:
    """In a process of its own: torch allows one made-up device per process, and it stays."""
    command = [sys.executable, "-m", "tests.runtime.host_waits", case]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


ALLOWED = {"side-stream-held": ("runtime/update/side_stream.py",)}
"""A step's norm is known only when the next forward has computed what was held back: asking for it waits for that."""


@pytest.mark.slow
@pytest.mark.parametrize("case", [*DAILY, *exhaustive(*(case for case in CASES if case not in DAILY))])
def test_no_step_makes_the_host_wait(case: str) -> None:
    """Step k's loss and norm come back during step k + 1, and are those of the CPU."""
    result = run(case)
    assert len(result["waits"]) == STEPS
    waits = [[site for site in step if site.split(":")[0] not in ALLOWED.get(case, ())] for step in result["waits"]]
    assert waits[STEADY:] == [[]] * (STEPS - STEADY)
    assert result["races"] == []
    for on_gpu, on_cpu in zip(result["gpu"], result["cpu"], strict=True):
        assert on_gpu == pytest.approx(on_cpu, abs=1e-9, rel=0)


@pytest.mark.slow
def test_planted_races_are_found() -> None:
    assert run("planted-races") == [1, 1, 1, 2]


@pytest.mark.slow
def test_planted_waits_are_found() -> None:
    result = run("planted")
    assert "_local_scalar_dense" in result[0]
    assert "fakegpu -> cpu" in result[1]
    assert "cpu -> fakegpu" in result[2]
    assert "cpu -> fakegpu" in result[3]
    assert "mask" in result[4]
    assert result[5]
    assert result[6:9] == ["", "", ""]
    assert result[9:] == ["[nan, nan, nan]", "[2.0, 2.0, 2.0]"]  # nothing there before the device has come to the copy
