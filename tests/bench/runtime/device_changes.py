"""Take a node away from a running job, and give it another one: ``python -m tests.bench.runtime.device_changes``.

A Ray cluster of two nodes with two CPUs each trains a pipeline over all four devices; then one node's raylet is killed
with all of its processes, and later a new node starts. The run goes on with two devices and then with four
(``train.elastic``), pipelined all along. Prints the seconds from each event to the first step after it, without the
``wait_s`` that lost devices have to come back, beside the losses' largest difference from a plain PyTorch loop in one
process. Limits: 10 s each, and 1e-9. Exit status 1 beyond them.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ray.cluster_utils import Cluster

from raypipe.job.load import load_job
from raypipe.observe.run_dir import ask_to_stop
from tests.bench.runtime.kill_driver import text_in
from tests.bench.runtime.kill_workers import ended
from tests.runtime.runs.killing import environment, events, rows
from tests.runtime.runs.plain_training import plain_losses

WAIT_S, LIMIT_S, LOSS_LIMIT = 1.0, 10.0, 1e-9
PATIENCE_S = 300.0
NODE = {"num_cpus": 2, "object_store_memory": 100 << 20, "dashboard_host": "127.0.0.1"}
JOB = """
name: elastic
model: {{type: gpt, layers: 6, hidden: 32, heads: 2, sequence: 16, vocabulary: 256, dropout: 0.1, tie_embeddings: true}}
data: {{type: bytes, path: "{path}"}}
train: {{steps: 5000, batch: 8, lr: 0.01, seed: 0, dtype: float64, clip: 1.0, eval_batches: 1, checkpoint_every: 50,
  keep_checkpoints: 2, elastic: {{wait_s: {wait}}}}}
parallel: {{auto: true, replicas: 1, microbatch: 1}}
"""


class Elastic:
    """A run on a cluster whose nodes come and go."""

    def __init__(self, folder: Path) -> None:
        self.cluster = Cluster(initialize_head=True, head_node_args=NODE)
        self.node = self.cluster.add_node(**NODE)
        self.job, self.directory = folder / "job.yaml", folder / "run"
        self.job.write_text(JOB.format(path=text_in(folder), wait=WAIT_S))
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

    def stop(self) -> tuple[dict[str, object], str]:
        """End the run; return its result and what it said."""
        if self.process.poll() is None and self.directory.is_dir():
            ask_to_stop(self.directory, "enough")
        _, result, said = ended(self.process, 60.0)
        return result, said

    def close(self) -> None:
        """End everything."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.cluster.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.runtime.device_changes", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raypipe-elastic-") as name:
        run = Elastic(Path(name))
        try:
            run.wait(lambda: run.steps() > 100)
            run.cluster.remove_node(run.node)
            lost_s = run.next_step_after_change(1) - WAIT_S
            here = run.steps()
            run.wait(lambda: run.steps() > here + 20)
            run.cluster.add_node(**NODE)
            came_s = run.next_step_after_change(2)
            result, said = run.stop()
        finally:
            run.close()
        if not result:
            print(said[-3000:], file=sys.stderr)
            return 1
        losses = result["losses"]
        assert isinstance(losses, list)
        plans = [f"{e['plan']['schedule']} x {e['plan']['stages']}" for e in events(run.directory, "resized")]
        plain = plain_losses(load_job(run.job), run.directory / "data", len(losses))
    difference = max(abs(a - b) for a, b in zip(losses, plain, strict=True))
    print(f"4 -> 2 devices ({plans[0]}): next step {lost_s:.1f} s after the node's death, {WAIT_S:g} s of waiting apart")
    print(f"2 -> 4 devices ({plans[1]}): next step {came_s:.1f} s after the node's start (limit {LIMIT_S:g} s each)")
    print(f"{len(losses)} losses, at most {difference:.1e} from a plain loop (limit {LOSS_LIMIT:g})")
    return 0 if max(lost_s, came_s) <= LIMIT_S and difference <= LOSS_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
