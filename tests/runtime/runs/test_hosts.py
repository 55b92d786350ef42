"""Training on several hosts: clocks that began at other times, a name that leads to loopback, no common storage."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raypipe.checkpoint import open_checkpoint
from raypipe.job.spec import load_job
from raypipe.observe.run_log import EVENTS, read_rows
from tests.data.documents_on_disk import some_documents, write_parquet
from tests.hosts import Host, hosts, ray_cluster
from tests.job_files import PIPELINE, write_job
from tests.ray_environment import without_ray
from tests.runtime.runs.plain_training import plain_losses
from tests.runtime.worker.from_memory import FromMemory

STEPS = 14
DAY = 86_400


@dataclass(frozen=True)
class Cluster:
    """Hosts with a raylet each."""

    hosts: list[Host]
    settings: dict[str, str]

    def train(self, job: Path, run: Path, *more: str) -> dict[str, Any]:
        """The result of ``raypipe train`` on the first host, and the node of each rank."""
        words = [sys.executable, "-m", "raypipe", "train", str(job), "--run-dir", str(run), "--json", *more]
        done = self.hosts[0].run(*words, timeout_s=400.0, **self.settings)
        assert done.returncode == 0, done.stdout + done.stderr
        started = [row for row in read_rows(run / EVENTS) if row["event"] == "started"][-1]
        return {**json.loads(done.stdout.splitlines()[-1]), "nodes": [device["node"] for device in started["devices"]]}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two hosts of one CPU: two stages take both."""
    with hosts(2, clock_offsets_s=(0, 1000)) as both, ray_cluster(both) as settings:
        for host in both:  # Gloo, left alone, takes the address that this leads to
            host.must(
                "sh", "-c", "echo 127.0.1.1 $(hostname) > /tmp/ray/hosts && mount --bind /tmp/ray/hosts /etc/hosts"
            )
        yield Cluster(both, settings)


def job_file(folder: Path, data: Path, parallel: dict[str, Any], **more: Any) -> Path:
    float64 = {"steps": STEPS, "seed": 3, "dtype": "float64", "eval_batches": 1}
    return write_job(folder / "job.yaml", data, parallel, hidden=16, **{**float64, **more})


def copied_files() -> set[Path]:
    """Folders of nodes to which files are copied, which end with their run."""
    return set(Path(tempfile.gettempdir()).glob("raypipe-files-*"))


def check_clocks(run: Path, result: dict[str, Any], most_s: float = 1.0) -> None:
    """In none of a run's times do the hosts' clocks show: no step of these jobs takes as long."""
    (predicted,) = (row for row in read_rows(run / EVENTS) if row["event"] == "predicted")
    assert 0 < predicted["step_s"] < most_s
    assert 0 < result["step_s_median"] < most_s


@pytest.mark.runs
@pytest.mark.own_ray
def test_a_host_that_shares_neither_the_run_directory_nor_the_documents_trains_and_resumes(cluster, tmp_path) -> None:
    """It is said; the losses are those of one process, also after a resume, and the checkpoint holds all stages."""
    before = copied_files()
    with tempfile.TemporaryDirectory() as name:
        cluster.hosts[1].hide(Path(name))
        run = Path(name) / "run"
        documents = write_parquet(Path(name) / "a.parquet", some_documents(20), group=3)
        job = job_file(tmp_path, documents, PIPELINE, kind="documents", max_failures=2)
        first = cluster.train(job, run, "--set", f"train.steps={STEPS // 2}")
        assert len(set(first["nodes"])) == 2
        check_clocks(run, first)
        checkpoint = open_checkpoint(run / "checkpoints" / f"step-{STEPS // 2:08d}")  # verifies every file
        assert {key.split("/")[1].split(".")[0] for key in checkpoint.keys if key.startswith("param/")} >= {"0", "3"}
        assert sorted(path.name for path in checkpoint.path.glob("rank-*")) == [
            "rank-00000.safetensors", "rank-00001.safetensors",
        ]  # fmt: skip
        result = cluster.train(job, run, "--resume")
        assert result["resumed_from"] == STEPS // 2
        expected = plain_losses(load_job(job), run / "data", STEPS, FromMemory(run / "data"))
        events = read_rows(run / EVENTS)
        assert json.loads((run / "timeline.json").read_text())
    assert first["losses"] == pytest.approx(expected[: STEPS // 2], abs=1e-9)
    assert result["losses"][-(STEPS // 2) :] == pytest.approx(expected[STEPS // 2 :], abs=1e-9)
    said = [row["message"] for row in events if row["event"] == "notice"]
    assert said[0].startswith(f"node {cluster.hosts[1].address} does not share {name}/run with the driver")
    assert not [row for row in events if row["event"] in ("restarted", "failed", "error")]
    assert copied_files() == before


@pytest.fixture(scope="module")
def two_a_host() -> Iterator[Cluster]:
    with hosts(2) as both, ray_cluster(both, cpus=2) as settings:
        yield Cluster(both, settings)


@pytest.mark.exhaustive
@pytest.mark.runs
@pytest.mark.own_ray
@pytest.mark.parametrize(("schedule", "first", "then"), [
    ("1f1b", {"innermost": "replicas"}, {"shard": "zero3", "innermost": "replicas"}),
    ("1f1b", {"shard": "zero1", "innermost": "replicas"}, {"shard": "zero3"}),
    ("chimera", {}, {"innermost": "replicas"}),
])  # fmt: skip
def test_a_run_and_its_resume_with_another_layout_follow_one_process(
    two_a_host, text_folder, tmp_path, schedule, first, then
) -> None:
    """Two copies of two stages; ranks 0 and 1 are the stages of one copy, 2 and 3 those of the other."""
    run, steps = tmp_path / "run", 4
    shape = {**PIPELINE, "schedule": schedule, "replicas": 2}
    options = {"clip": 1.0, "max_failures": 0}
    begun = two_a_host.train(job_file(tmp_path, text_folder, {**shape, **first}, steps=steps, **options), run)
    job = job_file(tmp_path, text_folder, {**shape, **then}, steps=2 * steps, **options)
    ended = two_a_host.train(job, run, "--resume")
    expected = plain_losses(load_job(job), run / "data", 2 * steps)
    assert begun["losses"] == pytest.approx(expected[:steps], abs=1e-9)
    assert ended["resumed_from"] == steps
    assert ended["losses"][-steps:] == pytest.approx(expected[steps:], abs=1e-9)
    for found, keys in ((begun, first), (ended, then)):
        a, b, c, d = found["nodes"]
        assert len({a, b, c, d}) == 2
        assert (a, b) == ((c, d) if keys.get("innermost") == "replicas" else (a, a))


@pytest.mark.exhaustive
@pytest.mark.runs
@pytest.mark.own_ray
def test_tensor_groups_on_three_hosts_train_as_one_process_does(text_folder, tmp_path) -> None:
    """Two devices each: a link of 1 Gb/s and 2 ms, and clocks that are a day apart."""
    job = job_file(tmp_path, text_folder, {**PIPELINE, "stages": 3, "tensor": 2}, layers=4, steps=12, clip=1.0)
    with (
        hosts(3, rate="1gbit", delay_s=0.002, clock_offsets_s=(DAY, 0, 2 * DAY)) as members,
        ray_cluster(members, cpus=2) as settings,
    ):
        result = Cluster(members, settings).train(job, tmp_path / "run")
    expected = plain_losses(load_job(job), tmp_path / "run" / "data", 12)
    assert result["losses"] == pytest.approx(expected, abs=1e-9)
    nodes = result["nodes"]
    assert nodes[0::2] == nodes[1::2], "a tensor-parallel group is on two hosts"
    assert len(set(nodes)) == 3
    check_clocks(tmp_path / "run", result, 5.0)
    assert not [
        row for row in read_rows(tmp_path / "run" / EVENTS) if row["event"] in ("notice", "restarted", "failed")
    ]


# A Ray cluster whose nodes name different accelerator types: measured once per type, planned, and trained so.

KINDS_STEPS = 4
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
@pytest.mark.own_ray
def test_each_stage_is_on_the_type_that_it_was_planned_for(text_folder, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    parallel = {"auto": True, "schedule": "1f1b", "stages": 2, "replan": False}
    job_file(tmp_path, text_folder, parallel, layers=4, steps=KINDS_STEPS)
    words = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, env=without_ray())
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    expected = plain_losses(load_job(job), tmp_path / "run" / "data", KINDS_STEPS)
    assert result["losses"] == pytest.approx(expected, abs=1e-9)
    nodes = json.loads((tmp_path / "nodes.json").read_text())
    (started,) = (row for row in read_rows(tmp_path / "run" / EVENTS) if row["event"] == "started")
    assert [nodes[device["node"]] for device in started["devices"]] == [["A"], ["B"]]
