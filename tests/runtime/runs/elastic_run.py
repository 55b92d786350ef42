"""A run on a Ray cluster whose nodes come and go (``train.elastic``), and a cluster of two nodes for it."""

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

from raypipe.observe.run_dir import STOP, ask
from tests.job_files import write_job
from tests.ray_environment import node_settings, without_ray
from tests.runtime.runs.killing import events

WAIT_S = 1.0
PATIENCE_S = 300.0


class TwoNodes:
    """A Ray cluster of this machine's, with two CPUs on each of two nodes."""

    def __init__(self, forks: bool = True) -> None:
        """``forks``: as of ``start_ray``."""
        self._each = {"num_cpus": 2, "object_store_memory": 100 << 20, **node_settings(forks)}
        self.cluster = Cluster(initialize_head=True, head_node_args=self._each)
        self.node = self.cluster.add_node(**self._each)
        """The one that is not the head."""
        asked = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH_")}
        self.settings = {"RAY_ADDRESS": self.cluster.address, **asked}
        """Of processes that join it: it asks for the token of this process, if an earlier Ray has left one."""

    def kill(self) -> None:
        """Kill the other node with all of its processes."""
        self.cluster.remove_node(self.node)

    def add(self) -> None:
        """Start another node in its place."""
        self.node = self.cluster.add_node(**self._each)

    def drain(self) -> None:
        """Say that the other node will go, as a cloud does before it takes one back."""
        words = ["--address", self.cluster.address, "--node-id", self.node.node_id, "--reason-message", "taken back"]
        reason = "DRAIN_NODE_REASON_PREEMPTION"
        subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *words, "--reason", reason,
             "--deadline-remaining-seconds", "600"],
            env=without_ray(**self.settings), check=True, capture_output=True,
        )  # fmt: skip

    def close(self) -> None:
        """End both."""
        self.cluster.shutdown()


class ElasticRun:
    """A run on a cluster whose nodes come and go."""

    def __init__(self, folder: Path, text: Path, settings: dict[str, str], *extra: str, **elastic: float) -> None:
        """Start the run.

        ``settings`` say where the cluster is, ``extra`` are options of the command, ``elastic`` keys of
        ``train.elastic``.
        """
        self.job, self.directory = folder / "job.yaml", folder / "run"
        write_job(
            self.job, text, {"auto": True, "replicas": 1, "microbatch": 1}, layers=6, steps=20000, lr=0.001,
            dtype="float64", clip=1.0, eval_batches=1, checkpoint_every=50, keep_checkpoints=2,
            elastic={"wait_s": WAIT_S, **elastic},
        )  # fmt: skip
        words = ["-m", "raypipe", "train", str(self.job), "--run-dir", str(self.directory), "--json", *extra]
        self.result: dict[str, Any] = {}
        """Empty if it failed."""
        self.said = ""
        self.process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=without_ray(**settings), start_new_session=True,
        )  # fmt: skip

    def steps(self) -> int:
        """Rows logged by now; only counted, because a run of thousands is asked twenty times a second."""
        path = self.directory / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until something holds.

        Raises:
            RuntimeError: the run has ended, or it takes too long.
        """
        begun = time.monotonic()
        while not until():
            if self.process.poll() is not None or time.monotonic() - begun > PATIENCE_S:
                self.finish()
                raise RuntimeError(f"the run does not go on: {self.said[-2000:]}")
            time.sleep(0.05)

    def next_step_after_change(self, number: int) -> None:
        """Wait for the first step after the ``number``-th change of devices."""
        self.wait(lambda: len(events(self.directory, "resized")) >= number)
        self.wait(lambda: len(events(self.directory, "started")) > number)
        step = self.steps()
        self.wait(lambda: self.steps() > step)

    def finish(self) -> None:
        """End the run, and keep its result and what it said."""
        if self.process.poll() is None and self.directory.is_dir():
            ask(self.directory, STOP, "enough")
        try:
            out, said = self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            out, said = self.process.communicate()
        self.result, self.said = json.loads(out) if self.process.returncode == 0 else {}, said

    def close(self) -> None:
        """End the run, whatever it does."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
