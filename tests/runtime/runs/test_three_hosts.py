"""Training on three hosts with two devices each: a link of 1 Gb/s and 2 ms, and clocks that are a day apart."""

from __future__ import annotations

import json
import sys

import pytest

from raypipe.job.spec import load_job
from raypipe.observe.run_log import EVENTS, read_rows
from tests.hosts import hosts, ray_cluster
from tests.runtime.runs.plain_training import plain_losses

STEPS = 12
DAY = 86_400
JOB = """
name: small
model: {{type: gpt, layers: 4, hidden: 16, heads: 2, sequence: 16, vocabulary: 256, dropout: 0.1, tie_embeddings: true}}
data: {{type: bytes, path: "{path}"}}
train: {{steps: {steps}, batch: 8, lr: 0.01, seed: 3, dtype: float64, clip: 1.0, eval_batches: 1}}
parallel: {{schedule: 1f1b, stages: 3, tensor: 2, microbatch: 2}}
"""


@pytest.mark.exhaustive
@pytest.mark.runs
def test_tensor_groups_on_three_hosts_train_as_one_process_does(text_folder, tmp_path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(path=text_folder, steps=STEPS))
    with (
        hosts(3, rate="1gbit", delay_s=0.002, clock_offsets_s=(DAY, 0, 2 * DAY)) as members,
        ray_cluster(members, cpus=2) as settings,
    ):
        words = [sys.executable, "-m", "raypipe", "train", str(job), "--run-dir", str(tmp_path / "run"), "--json"]
        done = members[0].run(*words, **settings)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[0])
    assert result["losses"] == pytest.approx(plain_losses(load_job(job), tmp_path / "run" / "data", STEPS), abs=1e-9)
    events = read_rows(tmp_path / "run" / EVENTS)
    (started,) = (row for row in events if row["event"] == "started")
    nodes = [device["node"] for device in started["devices"]]
    assert nodes[0::2] == nodes[1::2], "a tensor-parallel group is on two hosts"
    assert len(set(nodes)) == 3
    # A clock that is off by a second, let alone a day, would be seen in both.
    (predicted,) = (row for row in events if row["event"] == "predicted")
    assert 0 < predicted["step_s"] < 5
    assert 0 < result["step_s_median"] < 5
