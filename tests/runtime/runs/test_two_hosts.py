"""Training on two hosts: clocks that began at other times, a host name that leads to loopback, no common storage."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from raypipe.checkpoint import open_checkpoint
from raypipe.job.spec import load_job
from raypipe.observe.run_log import EVENTS, read_rows
from tests.data.documents_on_disk import some_documents, write_parquet
from tests.hosts import Host, hosts, ray_cluster
from tests.runtime.runs.plain_training import plain_losses
from tests.runtime.samples.from_memory import FromMemory

STEPS = 14
JOB = """
name: small
model: {{type: gpt, layers: 2, hidden: 16, heads: 2, sequence: 16, vocabulary: 256, dropout: 0.1, tie_embeddings: true}}
data: {{type: {data}, path: "{path}"}}
train: {{steps: {steps}, batch: 8, lr: 0.01, seed: 3, dtype: float64, eval_batches: 1, max_failures: 2}}
parallel: {{schedule: 1f1b, stages: 2, microbatch: 2}}
"""


@dataclass(frozen=True)
class Cluster:
    """Two hosts with a raylet each, of one CPU: two stages take both."""

    hosts: list[Host]
    settings: dict[str, str]

    def train(self, job: Path, run: Path, *more: str) -> tuple[int, str]:
        """Exit status and output of ``raypipe train`` on the first host."""
        words = [sys.executable, "-m", "raypipe", "train", str(job), "--run-dir", str(run), "--json", *more]
        done = self.hosts[0].run(*words, timeout_s=400.0, **self.settings)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hosts(2, clock_offsets_s=(0, 1000)) as both, ray_cluster(both) as settings:
        for host in both:  # Gloo, left alone, takes the address that this leads to
            host.must(
                "sh", "-c", "echo 127.0.1.1 $(hostname) > /tmp/ray/hosts && mount --bind /tmp/ray/hosts /etc/hosts"
            )
        yield Cluster(both, settings)


def job_file(folder: Path, path_of_data: Path, data: str = "bytes") -> Path:
    path = folder / "job.yaml"
    path.write_text(JOB.format(path=path_of_data, data=data, steps=STEPS))
    return path


def check_clocks(events: list[dict], result: dict) -> None:
    """A run on both hosts, in none of whose times their clocks show: no step of this job takes a tenth of a second."""
    (started,) = (row for row in events if row["event"] == "started")
    assert len({device["node"] for device in started["devices"]}) == 2
    (predicted,) = (row for row in events if row["event"] == "predicted")
    assert 0 < predicted["step_s"] < 1
    assert 0 < result["step_s_median"] < 1


@pytest.mark.exhaustive  # the next test's first run, with a run directory that both share
@pytest.mark.runs
def test_two_hosts_train_as_one_process_does(cluster, text_folder, tmp_path) -> None:
    job = job_file(tmp_path, text_folder)
    status, output = cluster.train(job, tmp_path / "run")
    assert status == 0, output
    result = json.loads(output.splitlines()[0])
    assert result["losses"] == pytest.approx(plain_losses(load_job(job), tmp_path / "run" / "data", STEPS), abs=1e-9)
    events = read_rows(tmp_path / "run" / EVENTS)
    assert not [row for row in events if row["event"] in ("notice", "restarted", "failed")]
    check_clocks(events, result)
    timeline = json.loads((tmp_path / "run" / "timeline.json").read_text())
    assert timeline


@pytest.mark.runs
def test_a_host_that_shares_neither_the_run_directory_nor_the_documents_trains_and_resumes(cluster, tmp_path) -> None:
    """It is said; the losses are those of one process, also after a resume, and the checkpoint holds all stages."""
    with tempfile.TemporaryDirectory() as name:
        cluster.hosts[1].hide(Path(name))
        run = Path(name) / "run"
        documents = write_parquet(Path(name) / "a.parquet", some_documents(20), group=3)
        job = job_file(tmp_path, documents, data="documents")
        half = ["--set", f"train.steps={STEPS // 2}"]
        status, output = cluster.train(job, run, *half)
        assert status == 0, output
        first = json.loads(output.splitlines()[0])
        check_clocks(read_rows(run / EVENTS), first)
        checkpoint = open_checkpoint(run / "checkpoints" / f"step-{STEPS // 2:08d}")  # verifies every file
        assert {key.split("/")[1].split(".")[0] for key in checkpoint.keys if key.startswith("param/")} >= {"0", "3"}
        assert sorted(path.name for path in checkpoint.path.glob("rank-*")) == [
            "rank-00000.safetensors", "rank-00001.safetensors",
        ]  # fmt: skip
        status, output = cluster.train(job, run, "--resume")
        assert status == 0, output
        result = json.loads(output.splitlines()[0])
        assert result["resumed_from"] == STEPS // 2
        expected = plain_losses(load_job(job), run / "data", STEPS, FromMemory(run / "data"))
        events = read_rows(run / EVENTS)
    assert first["losses"] == pytest.approx(expected[: STEPS // 2], abs=1e-9)
    assert result["losses"][-(STEPS // 2) :] == pytest.approx(expected[STEPS // 2 :], abs=1e-9)
    said = [row["message"] for row in events if row["event"] == "notice"]
    assert said[0].startswith(f"node {cluster.hosts[1].address} does not share {name}/run with the driver")
    assert not [row for row in events if row["event"] in ("restarted", "failed", "error")]
    assert not list(Path(tempfile.gettempdir()).glob("raypipe-files-*"))
