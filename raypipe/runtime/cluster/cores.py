"""Check whether every device of a CPU run has a core of its own."""

from __future__ import annotations

import os
from pathlib import Path

import ray

from raypipe.runtime.hosts.devices import DeviceRequest

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def physical_cores(siblings: str = SIBLINGS) -> int:
    """Count the physical cores that this process may run on: hyperthreads of one core count once."""
    cpus = os.sched_getaffinity(0)
    cores = set()
    for cpu in cpus:
        try:
            cores.add(Path(siblings.format(cpu)).read_text(encoding="ascii").strip())
        except OSError:  # the system does not list siblings: count every logical CPU
            return len(cpus)
    return len(cores)


def cores_of_one_host(request: DeviceRequest) -> int | None:
    """Count the cores that all devices share; None where devices are GPUs or spread over several hosts."""
    one_host = sum(bool(node["Alive"]) for node in ray.nodes()) == 1
    elsewhere = os.environ.get("RAY_ADDRESS", "").startswith("ray://")
    return physical_cores() if one_host and not elsewhere and not request.gpus else None


def warning(devices: int, cores: int | None) -> str | None:
    """Return a warning if there are more devices than cores; None otherwise.

    >>> warning(2, 2), warning(2, None)
    (None, None)
    >>> print(warning(4, 2))
    4 devices share 2 cores: steps take longer than predicted, and no schedule shows its gain
    """
    if cores is None or devices <= cores:
        return None
    noun = "core" if cores == 1 else "cores"
    return f"{devices} devices share {cores} {noun}: steps take longer than predicted, and no schedule shows its gain"
