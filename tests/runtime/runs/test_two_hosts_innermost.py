"""Two copies of two stages on two hosts of two devices: which share a host is up to the plan, and changes no loss."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raypipe.job.spec import load_job
from raypipe.observe.run_log import EVENTS, read_rows
from tests.hosts import Host, hosts, ray_cluster
from tests.runtime.runs.plain_training import plain_losses

JOB = """
name: small
model: {{type: gpt, layers: 2, hidden: 16, heads: 2, sequence: 16, vocabulary: 256, dropout: 0.1, tie_embeddings: true}}
data: {{type: bytes, path: "{path}"}}
train: {{steps: {steps}, batch: 8, lr: 0.01, seed: 3, dtype: float64, clip: 1.0, max_failures: 0}}
parallel: {parallel}
"""
STEPS = 4
SHAPE = {"schedule": "1f1b", "stages": 2, "replicas": 2, "microbatch": 2}


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[list[Host], dict[str, str]]]:
    with hosts(2) as both, ray_cluster(both, cpus=2) as settings:
        yield both, settings


def trained(cluster, job: Path, run: Path, parallel: dict[str, Any], steps: int, data: Path, *more: str) -> dict:
    """The result of ``raypipe train``, and the node of each rank."""
    both, settings = cluster
    job.write_text(JOB.format(path=data, parallel=json.dumps(parallel), steps=steps))
    words = [sys.executable, "-m", "raypipe", "train", str(job), "--run-dir", str(run), "--json", *more]
    done = both[0].run(*words, timeout_s=400.0, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    started = [row for row in read_rows(run / EVENTS) if row["event"] == "started"][-1]
    return {**json.loads(done.stdout.splitlines()[-1]), "nodes": [device["node"] for device in started["devices"]]}


@pytest.mark.exhaustive
@pytest.mark.runs
@pytest.mark.parametrize(("schedule", "first", "then"), [
    ("1f1b", {"innermost": "replicas"}, {"shard": "zero3", "innermost": "replicas"}),
    ("1f1b", {"shard": "zero1", "innermost": "replicas"}, {"shard": "zero3"}),
    ("chimera", {}, {"innermost": "replicas"}),
])  # fmt: skip
def test_a_run_and_its_resume_with_another_layout_follow_one_process(
    cluster, text_folder, tmp_path, schedule, first, then
) -> None:
    """Ranks 0 and 1 are the stages of one copy, 2 and 3 those of the other."""
    job, run = tmp_path / "job.yaml", tmp_path / "run"
    shape = {**SHAPE, "schedule": schedule}
    begun = trained(cluster, job, run, {**shape, **first}, STEPS, text_folder)
    ended = trained(cluster, job, run, {**shape, **then}, 2 * STEPS, text_folder, "--resume")
    expected = plain_losses(load_job(job), run / "data", 2 * STEPS)
    assert begun["losses"] == pytest.approx(expected[:STEPS], abs=1e-9)
    assert ended["resumed_from"] == STEPS
    assert ended["losses"][-STEPS:] == pytest.approx(expected[STEPS:], abs=1e-9)
    for found, keys in ((begun, first), (ended, then)):
        a, b, c, d = found["nodes"]
        assert len({a, b, c, d}) == 2
        assert (a, b) == ((c, d) if keys.get("innermost") == "replicas" else (a, a))
