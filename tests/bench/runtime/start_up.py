"""How long the workers of a run take to find each other, against their number: groups, channels and the first norm.

``python -m tests.bench.runtime.start_up 8 32 128``: pipelines of eight emulated devices, as many copies as it takes.
The processes are forked from one that has imported torch and wait for one another, so that what is timed is a worker's
``Communicators`` and not the start of processes, which is Ray's: that of actors is timed with ``--actors 8 32``.

With ``--hosts`` every device pretends to be on a host of its own: its messages go over Gloo instead of shared memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import time
from collections.abc import Iterable
from statistics import median
from typing import Any

import torch

from raypipe.runtime.communicators import Communicators, Topology
from raypipe.runtime.transport.channel import Peer
from raypipe.runtime.transport.interfaces import LOOPBACK
from raypipe.runtime.transport.process_groups import in_rounds
from raypipe.runtime.transport.same_host.shared_memory import cleanup
from raypipe.runtime.update.gradients import shared_groups
from raypipe.runtime.update.norm import Shares
from raypipe.schedule import Shape, generate
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.programs import edges
from raypipe.schedule.passes import replicate

DEPTH = 8
NORMS = 20


def schedule_on(devices: int) -> Schedule:
    """1F1B on pipelines of ``DEPTH`` devices."""
    return replicate(generate("1f1b", Shape(devices=DEPTH, microbatches=DEPTH)), devices // DEPTH)


def topology_of(schedule: Schedule, hosts: bool, run_id: str) -> Topology:
    """The topology that the driver would send."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    return Topology(
        peers=tuple(Peer(d, f"n{d if hosts else 0}", "cpu", f"device {d}") for d in range(schedule.devices)),
        rendezvous=f"tcp://{LOOPBACK}:{port}", edges=edges(schedule), groups=shared_groups(schedule.placement, ()),
        transport="auto", run_id=run_id,
    )  # fmt: skip


def device(rank: int, topology: Topology, starts: Any, ends: Any, found: Any) -> None:
    """One emulated device."""
    torch.set_num_threads(1)
    starts.wait()
    begun = time.monotonic()
    communicators = Communicators(rank, topology, "gloo")
    ready = time.monotonic()
    shares = Shares(communicators.world)
    norms = []
    for _ in range(NORMS):
        before = time.monotonic()
        shares.start(float(rank))
        shares.wait(lambda: False)
        norms.append(time.monotonic() - before)
    found.put((begun, ready, norms[0], median(norms)))
    ends.wait()
    os._exit(0)


def connect(devices: int, hosts: bool) -> tuple[float, float, float]:
    """Seconds until the last of so many devices has its communicators; those of its first norm, and of a later one."""
    context = multiprocessing.get_context("fork")
    starts, ends, found = context.Event(), context.Event(), context.SimpleQueue()
    run_id = f"start-up-{os.getpid()}-{devices}"
    topology = topology_of(schedule_on(devices), hosts, run_id)
    processes = [
        context.Process(target=device, args=(d, topology, starts, ends, found), daemon=True) for d in range(devices)
    ]
    try:
        for one in processes:
            one.start()
        starts.set()
        rows = [found.get() for _ in processes]
    finally:
        ends.set()
        for one in processes:
            one.join(5)
            one.kill()
        cleanup(run_id)
    took = max(ready for _, ready, _, _ in rows) - min(begun for begun, _, _, _ in rows)
    return took, max(first for _, _, first, _ in rows), median(later for _, _, _, later in rows)


def report(counts: Iterable[int], hosts: bool) -> None:
    """Print a row for each number of devices."""
    print("devices  process groups  rounds  connected s  first norm ms  norm ms")
    for devices in counts:
        schedule = schedule_on(devices)
        topology = topology_of(schedule, hosts, "counted")
        rounds = len(in_rounds([topology.groups[name] for name in sorted(topology.groups)]))
        took, first, later = connect(devices, hosts)
        made = topology.process_groups()
        print(
            f"{devices:7d}  {made:14d}  {rounds:6d}  {took:11.2f}  {first * 1e3:13.1f}  {later * 1e3:7.2f}", flush=True
        )


def actors(counts: Iterable[int]) -> None:
    """Print how long Ray takes to start so many actors of emulated devices."""
    import ray

    from raypipe.runtime.cluster.connect import connect as join
    from raypipe.runtime.cluster.worker_group import start_worker_group
    from raypipe.runtime.emulation.emulated_worker import EmulatedWorker

    print("devices  actors s")
    for devices in counts:
        request = join(devices, emulated=True)
        begun = time.monotonic()
        workers = start_worker_group(schedule_on(devices), devices // DEPTH, request, EmulatedWorker)
        print(f"{devices:7d}  {time.monotonic() - begun:8.1f}", flush=True)
        workers.stop()
    ray.shutdown()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices", type=int, nargs="*", help=f"multiples of {DEPTH}")
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--actors", type=int, nargs="*", default=[])
    asked = parser.parse_args()
    if asked.devices:
        report(asked.devices, asked.hosts)
    if asked.actors:
        actors(asked.actors)


if __name__ == "__main__":
    main()
