"""Take a node away from a running job, and give it another one: ``python -m tests.bench.runtime.device_changes``.

A Ray cluster of two nodes with two CPUs each trains a pipeline over all four devices; then one node's raylet is killed
with all of its processes, a new node starts, and later that one is drained, as before a preemption. The run goes on
with two devices, with four and with two (``train.elastic``), pipelined all along. Prints the seconds from each event to
the first step after it, without the ``wait_s`` that lost devices have to come back, beside the losses' largest
difference from a plain PyTorch loop in one process. Limits: 10 s each, and 1e-9. Exit status 1 beyond them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from raypipe.job.load import load_job
from tests.bench.runtime.kill_driver import text_in
from tests.runtime.runs.elastic_run import NODE, WAIT_S, ElasticRun
from tests.runtime.runs.killing import events
from tests.runtime.runs.plain_training import plain_losses

LIMIT_S, LOSS_LIMIT = 10.0, 1e-9


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.runtime.device_changes", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raypipe-elastic-") as name:
        run = ElasticRun(Path(name), text_in(Path(name)))
        try:
            run.wait(lambda: run.steps() > 100)
            run.cluster.remove_node(run.node)
            lost_s = run.next_step_after_change(1) - WAIT_S
            here = run.steps()
            run.wait(lambda: run.steps() > here + 20)
            node = run.cluster.add_node(**NODE)
            came_s = run.next_step_after_change(2)
            here = run.steps()
            run.wait(lambda: run.steps() > here + 20)
            run.drain(node)
            drained_s = run.next_step_after_change(3)
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
    print(f"4 -> 2 devices ({plans[0]}): next step {lost_s:.1f} s after the node's death and {WAIT_S:g} s of waiting")
    print(f"2 -> 4 devices ({plans[1]}): next step {came_s:.1f} s after the node's start (limit {LIMIT_S:g} s each)")
    print(f"4 -> 2 devices ({plans[2]}): next step {drained_s:.1f} s after the notice that a node will go")
    print(f"{len(losses)} losses, at most {difference:.1e} from a plain loop (limit {LOSS_LIMIT:g})")
    return 0 if max(lost_s, came_s, drained_s) <= LIMIT_S and difference <= LOSS_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
