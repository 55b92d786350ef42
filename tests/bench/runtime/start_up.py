"""How long emulated devices take from the call to the end of their first step, against their number.

    python -m tests.bench.runtime.start_up [8 32 128] [--turns 3]

Pipelines of eight devices, as many copies as it takes; every step is the same 45 ms of waits, or 46 with sums. Ray runs
before, and everything else counts (``emulate``, from its call to its return): making the schedule, reserving, the
actor and its import of torch, the devices' processes, checks, process groups and channels, and the step. The numbers of
devices take turns, and a row is the median turn, because other work on the machine slows down some.

    python -m tests.bench.runtime.start_up 8 32 128 --connect [--hosts]

times only how long the devices' communicators take, and then the gradient norm, in processes that are forked from this
one: what a run on real devices would have of that growth too. Processor seconds are those of all devices together; they
depend less on what else the machine does. With ``--hosts`` every device pretends to be on a host of its own: its
messages go over Gloo instead of shared memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from raypipe.runtime.emulation.device_processes import ENVIRONMENT
from raypipe.runtime.setup.communicators import Communicators, Topology
from raypipe.runtime.transport.channel import Peer
from raypipe.runtime.transport.interfaces import LOOPBACK
from raypipe.runtime.transport.process_groups import in_rounds
from raypipe.runtime.update.gradients import shared_groups
from raypipe.runtime.update.norm import Shares
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.programs import edges
from raypipe.schedule.passes import replicate

DEPTH = 8
TASK_S = 0.001
NORMS = 20


def pipeline() -> Schedule:
    """1F1B on ``DEPTH`` devices."""
    return generate("1f1b", Shape(devices=DEPTH, microbatches=DEPTH))


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
    begun, used = time.monotonic(), time.process_time()
    communicators = Communicators(rank, topology, "gloo", LOOPBACK)
    ready, used = time.monotonic(), time.process_time() - used
    shares = Shares(communicators.world)
    norms = []
    for _ in range(NORMS):
        before = time.monotonic()
        shares.start(float(rank))
        shares.wait(lambda: False)
        norms.append(time.monotonic() - before)
    found.put((begun, ready, used, norms[0], median(norms)))
    ends.wait()
    os._exit(0)


def connect(devices: int, hosts: bool) -> str:
    """A row of the table of communicators."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("fork")
    starts, ends, found = context.Event(), context.Event(), context.SimpleQueue()
    topology = topology_of(replicate(pipeline(), devices // DEPTH), hosts, f"start-up-{os.getpid()}-{devices}")
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
    begun, ready, used, firsts, laters = zip(*rows, strict=True)
    rounds = len(in_rounds([topology.groups[name] for name in sorted(topology.groups)]))
    return (
        f"{devices:7d}  {topology.process_groups():14d}  {rounds:6d}  {max(ready) - min(begun):11.2f}  "
        f"{sum(used):11.2f}  {max(firsts) * 1e3:13.1f}  {median(laters) * 1e3:7.2f}"
    )


def first_step(devices: int) -> float:
    """Seconds from the call of ``emulate`` for one step to its return."""
    from raypipe.runtime.emulation.emulated_run import emulate
    from raypipe.runtime.emulation.links import Links

    begun = time.monotonic()
    emulate(pipeline(), CostTable.even(DEPTH, TASK_S, TASK_S, TASK_S), Links(), 1, devices // DEPTH)
    return time.monotonic() - begun


def until_first_step(counts: Sequence[int], turns: int) -> None:
    """Print the table of start-ups."""
    import ray

    from raypipe.runtime.cluster.connect import connect as join

    os.environ.setdefault("RAY_ADDRESS", "local")
    join(DEPTH, emulated=True)
    took: dict[int, list[float]] = {devices: [] for devices in counts}
    for turn in range(turns):
        for devices in counts:
            took[devices].append(first_step(devices))
            print(f"turn {turn + 1}: {devices} devices {took[devices][-1]:.1f} s", flush=True)
    print("devices  start-up s  times that of the first")
    for devices, seconds in took.items():
        print(f"{devices:7d}  {median(seconds):10.1f}  {median(seconds) / median(took[counts[0]]):23.2f}")
    ray.shutdown()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices", type=int, nargs="*", default=[8, 32, 128], help=f"multiples of {DEPTH}")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--connect", action="store_true")
    parser.add_argument("--hosts", action="store_true")
    asked = parser.parse_args()
    if not asked.connect:
        until_first_step(asked.devices, asked.turns)
        return
    print("devices  process groups  rounds  connected s  processor s  first norm ms  norm ms")
    for devices in asked.devices:
        print(connect(devices, asked.hosts), flush=True)


if __name__ == "__main__":
    main()
