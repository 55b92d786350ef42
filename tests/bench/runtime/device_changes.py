"""Take nodes away from a running job, and give it others: ``python -m tests.bench.runtime.device_changes``.

A Ray cluster of two nodes with two CPUs each trains a pipeline over all four devices; then one node's raylet is killed
with all of its processes, a new node starts, and that one is drained, as before a preemption. The run goes on with two
devices, with four and with two (``train.elastic``), pipelined all along; ``--rounds`` kills and starts a node as often,
at random moments. With ``--autoscaler`` it begins on a head with two CPUs, and Ray's autoscaler starts the second node.
Prints the seconds from each event to the first step after the change, without the ``wait_s`` that lost devices have to
come back, and those for which nothing was trained; and the losses' largest difference from a plain PyTorch loop in one
process. Exit status 1 where training stood still for longer than the limit, or a loss differs.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from raypipe.job.spec import load_job
from raypipe.runtime.setup.communicators import own_address
from tests.bench.command import options, write_rows
from tests.job_files import write_text
from tests.ray_head import free_ports, ray_head
from tests.runtime.runs.elastic_run import WAIT_S, ElasticRun, TwoNodes
from tests.runtime.runs.killing import events
from tests.runtime.runs.plain_training import plain_losses

LIMIT_S, AUTOSCALER_S, LOSS_LIMIT = 10.0, 15.0, 1e-9


AUTOSCALING: dict[str, Any] = {
    "cluster_name": "fake",
    "max_workers": 1,
    "provider": {
        "type": "fake_multinode", "use_node_id_as_ip": True, "disable_node_updaters": True,
        "disable_launch_config_check": True,
    },
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
        "more": {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 1},
    },
    "head_node_type": "ray.head.default",
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 60,
    "auth": {},
    "file_mounts": {},
    "file_mounts_sync_continuously": False,
    **{key: [] for key in (
        "cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands",
        "head_setup_commands", "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands",
    )},
}  # fmt: skip
"""Ray's provider of nodes that are processes of this machine; ``train.elastic.max_devices`` asks for the second."""


Seconds = list[tuple[str, float, float]]
"""Of each event: what it was, until the next step, and without training."""
KILL, START, DRAIN = "a node is killed", "a node starts", "a node is to go"


def stood_still(run: ElasticRun) -> float:
    """Return the seconds since the run paused for its newest change; call it at the first step after that."""
    return time.time() - float(events(run.directory, "paused")[-1]["time"])


def with_nodes(folder: Path, rounds: int) -> tuple[ElasticRun, Seconds]:
    """Kill and start a node ``rounds`` times, then drain it; return the run and the seconds of each event."""
    nodes = TwoNodes(forks=False)
    bring = {KILL: nodes.kill, START: nodes.add, DRAIN: nodes.drain}
    try:
        run = ElasticRun(folder, write_text(folder / "text"), nodes.settings)
        seconds: Seconds = []
        try:
            for number, what in enumerate([KILL, START] * rounds + [DRAIN], 1):
                wanted = run.steps() + random.randint(30, 90)
                run.wait(lambda: run.steps() > wanted)  # noqa: B023 - called at once
                begun = time.monotonic()
                bring[what]()
                if what != KILL:  # what brings it about takes time; a kill is the first thing that happens
                    begun = time.monotonic()
                run.next_step_after_change(number)
                took = time.monotonic() - begun
                seconds.append((what, *((took - WAIT_S,) * 2 if what == KILL else (took, stood_still(run)))))
            run.finish()
        finally:
            run.close()
        return run, seconds
    finally:
        nodes.close()


def with_autoscaler(folder: Path) -> tuple[ElasticRun, Seconds]:
    """Begin on the head alone; the autoscaler starts a node that the run asks for."""
    config, (port,) = folder / "autoscaling.json", free_ports(1)
    provider = {**AUTOSCALING["provider"], "gcs_address": f"{own_address()}:{port}"}
    config.write_text(json.dumps({**AUTOSCALING, "provider": provider}))
    options = [f"--autoscaling-config={config}"]
    with ray_head(2, options, port, AUTOSCALER_UPDATE_INTERVAL_S="1", RAY_FAKE_CLUSTER="1") as head:
        settings = head.token | {"RAY_ADDRESS": head.address}
        run = ElasticRun(folder, write_text(folder / "text"), settings, max_devices=4)
        try:
            run.wait(lambda: run.steps() > 0)
            begun = time.monotonic()  # the run has asked for the node before
            run.next_step_after_change(1)
            seconds = [("the autoscaler starts a node", time.monotonic() - begun, stood_still(run))]
            run.finish()
        finally:
            run.close()
    return run, seconds


def main() -> int:
    """Print the seconds of each change and the losses' difference; exit status 1 beyond a limit."""
    args = options(__doc__, autoscaler=False, rounds=1, json=Path)
    with tempfile.TemporaryDirectory(prefix="raypipe-elastic-") as name:
        run, seconds = with_autoscaler(Path(name)) if args.autoscaler else with_nodes(Path(name), args.rounds)
        if not run.result:
            print(run.said[-3000:], file=sys.stderr)
            return 1
        losses = run.result["losses"]
        changes = events(run.directory, "resized")
        plain = plain_losses(load_job(run.job), run.directory / "data", len(losses))
    difference = max(abs(a - b) for a, b in zip(losses, plain, strict=True))
    for (what, took, still), change in zip(seconds, changes, strict=True):
        plan = f"{change['plan']['schedule']} over {change['plan']['stages']} stages"
        print(
            f"{what}: {change['was']} -> {change['devices']} devices, {plan}: next step after {took:.1f} s, "
            f"{still:.1f} s of it without training"
        )
    write_rows(args.json, [{"what": what, "seconds": took, "without_training": s} for what, took, s in seconds])
    limit_s = AUTOSCALER_S if args.autoscaler else LIMIT_S
    print(
        f"limit {limit_s:g} s without training; {len(losses)} losses, at most {difference:.1e} from a plain loop "
        f"({LOSS_LIMIT:g})"
    )
    return 0 if max(still for _, _, still in seconds) <= limit_s and difference <= LOSS_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
