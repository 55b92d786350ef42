"""A Ray cluster whose nodes name different accelerator types: measured once per type, planned, and trained so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.job.spec import load_job
from raypipe.observe.run_log import EVENTS, read_rows
from tests.ray_environment import without_ray
from tests.runtime.runs.plain_training import plain_losses

STEPS = 4
JOB = """
name: small
model: {{type: gpt, layers: 4, hidden: 16, heads: 2, sequence: 16, vocabulary: 256}}
data: {{type: bytes, path: "{path}"}}
train: {{steps: {steps}, batch: 8, lr: 0.01, seed: 3, dtype: float64, eval_batches: 1}}
parallel: {{auto: true, schedule: 1f1b, stages: 2, replan: false}}
"""
CODE = """
import atexit, json, os, sys
from pathlib import Path
os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
import ray
from ray.cluster_utils import Cluster

from tests.ray_environment import node_settings

folder = Path(sys.argv[1])
small = {"num_cpus": 1, "object_store_memory": 100 << 20, **node_settings()}
cluster = Cluster()
atexit.register(lambda: (ray.shutdown(), cluster.shutdown()))  # also where something below fails
for kind in ("A", "B"):
    cluster.add_node(resources={"accelerator_type:" + kind: 1}, **small)
os.environ["RAY_ADDRESS"] = cluster.address
from raypipe.job.spec import load_job
from raypipe.plan.choose import choose
from raypipe.profiling.profile_job import measure_profile
job = load_job(folder / "job.yaml")
profile = measure_profile(job, [2], quick=True)
assert {kind.accelerator_type for kind in profile.kinds} == {"A", "B"}, profile
assert profile.hosts == (1, 1) and profile.devices == 2
assert profile.kinds[0].between == profile.kinds[1].between != profile.inside or profile.between.alpha_s > 0
# Both are this machine; a plan for a B that is four times as slow, both so slow that what is measured on a busy machine
# decides nothing.
own = {kind.accelerator_type: kind for kind in profile.kinds}
from raypipe.cost.kinds import of_kinds
slow = own["A"].at_speed(1e4)
slower = own["B"].model_copy(update={"layers": own["A"].at_speed(4e4).layers})
plan = choose(job, of_kinds([slow, slower]), search_s=0).plan
assert plan.made_for.kinds == ("A", "B"), plan
assert len(plan.cut[1]) < len(plan.cut[0]), plan.cut
plan.save(folder / "plan.json")
found = {node["NodeID"]: [name[-1] for name in node["Resources"] if name.startswith("accelerator_type:")]
         for node in ray.nodes()}
(folder / "nodes.json").write_text(json.dumps(found))
from raypipe.cli import run
from tests.driver_here import without_ray_train
without_ray_train()
words = ["train", str(folder / "job.yaml"), "--plan", str(folder / "plan.json"), "--run-dir", str(folder / "run")]
sys.exit(run([*words, "--json"]))
"""


@pytest.mark.runs
def test_each_stage_is_on_the_type_that_it_was_planned_for(text_folder, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(path=text_folder, steps=STEPS))
    words = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, env=without_ray())
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    expected = plain_losses(load_job(job), tmp_path / "run" / "data", STEPS)
    assert result["losses"] == pytest.approx(expected, abs=1e-9)
    nodes = json.loads((tmp_path / "nodes.json").read_text())
    (started,) = (row for row in read_rows(tmp_path / "run" / EVENTS) if row["event"] == "started")
    assert [nodes[device["node"]] for device in started["devices"]] == [["A"], ["B"]]
