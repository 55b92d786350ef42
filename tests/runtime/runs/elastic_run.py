"""A run on a Ray cluster of its own whose nodes come and go (``train.elastic``)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from raypipe.observe.run_dir import ask_to_stop
from tests.runtime.runs.killing import environment, events, rows

WAIT_S = 1.0
PATIENCE_S = 300.0
NODE = {"num_cpus": 2, "object_store_memory": 100 << 20, "dashboard_host": "127.0.0.1"}
JOB = """
name: elastic
model: {{type: gpt, layers: 6, hidden: 32, heads: 2, sequence: 16, vocabulary: 256, dropout: 0.1, tie_embeddings: true}}
data: {{type: bytes, path: "{path}"}}
train: {{steps: 5000, batch: 8, lr: 0.001, seed: 0, dtype: float64, clip: 1.0, eval_batches: 1, checkpoint_every: 50,
  keep_checkpoints: 2, elastic: {{wait_s: {wait}}}}}
parallel: {{auto: true, replicas: 1, microbatch: 1}}
"""


class ElasticRun:
    """A run on a cluster whose nodes come and go."""

    def __init__(self, folder: Path, text: Path) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args=NODE)
        self.node = self.cluster.add_node(**NODE)
        self.job, self.directory = folder / "job.yaml", folder / "run"
        self.job.write_text(JOB.format(path=text, wait=WAIT_S))
        words = ["-m", "raypipe", "train", str(self.job), "--run-dir", str(self.directory), "--json"]
        self.process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment() | {"RAY_ADDRESS": self.cluster.address}, start_new_session=True,
        )  # fmt: skip

    def steps(self) -> int:
        """Steps logged by now."""
        return len(rows(self.directory / "metrics.jsonl"))

    def wait(self, until: Callable[[], bool]) -> float:
        """Wait, and return for how many seconds."""
        begun = time.monotonic()
        while not until():
            if self.process.poll() is not None or time.monotonic() - begun > PATIENCE_S:
                raise RuntimeError(f"the run does not go on: {self.stop()[1][-2000:]}")
            time.sleep(0.05)
        return time.monotonic() - begun

    def next_step_after_change(self, number: int) -> float:
        """Wait for the first step after the ``number``-th change of devices; return the seconds until then."""
        changed = self.wait(lambda: len(events(self.directory, "resized")) >= number)
        started = self.wait(lambda: len(events(self.directory, "started")) > number)
        step = self.steps()
        return changed + started + self.wait(lambda: self.steps() > step)

    def drain(self, node: Any) -> None:
        """Say that a node will go, as a cloud does before it takes one back."""
        words = ["--address", self.cluster.address, "--node-id", node.node_id, "--reason-message", "taken back"]
        reason = "DRAIN_NODE_REASON_PREEMPTION"
        subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *words, "--reason", reason,
             "--deadline-remaining-seconds", "600"],
            env=environment(), check=True, capture_output=True,
        )  # fmt: skip

    def stop(self) -> tuple[dict[str, Any], str]:
        """End the run; return its result and what it said."""
        if self.process.poll() is None and self.directory.is_dir():
            ask_to_stop(self.directory, "enough")
        try:
            out, said = self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            out, said = self.process.communicate()
        return json.loads(out.splitlines()[0]) if self.process.returncode == 0 else {}, said

    def close(self) -> None:
        """End everything."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.cluster.shutdown()
