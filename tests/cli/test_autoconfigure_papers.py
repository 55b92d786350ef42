"""Chimera's choices (Li and Hoefler 2021, section 4.2.2), as the command makes them on the machine in cluster/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raypipe.cli import run
from tests.exhaustive import exhaustive

ROOT = Path(__file__).parents[2]
RULE = ["--policy", "largest-microbatch"]


def chimeras(capsys, job: str, devices: int, *words: str) -> list[dict[str, object]]:
    """The candidates of Chimera's family that fit, the fastest first."""
    machine = ROOT / "cluster" / "devices" / "piz-daint.yaml"
    given = [ROOT / "jobs" / job, "--cluster", machine, "--devices", devices, "--search", 0, "--json", *words]
    assert run(["autoconfigure", *map(str, given)]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    return [row for row in told["candidates"] if row["schedule"] == "chimera" and row["fits"]]


@pytest.mark.slow
@pytest.mark.parametrize("policy", [[], *exhaustive(RULE)], ids=["best", "largest micro-batch"])
def test_bert_48_on_32_nodes(policy, capsys) -> None:
    best, *others = chimeras(capsys, "bert-48.yaml", 32, "--set", "parallel.schedule=chimera", "--top", "3", *policy)
    assert (best["replicas"], best["stages"], best["microbatch"], best["recompute"]) == (8, 4, 8, "none")
    assert others
