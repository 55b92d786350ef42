"""Choose the Ray resources each device reserves, and check that the cluster can provide enough of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ray

from raypipe.errors import SpecError

SHOWN = 8
"""Number of nodes that an error lists."""
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
"""Environment of a process that Ray gives no GPU: since 2.60 Ray leaves it all that its node has."""
OVERSUBSCRIPTION = 8
"""Workers per core on a Ray that raypipe itself starts: enough to try any plan on a laptop."""


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """The Ray resources that one worker reserves."""

    cpus: float
    gpus: float

    def bundle(self, together: int = 1) -> dict[str, float]:
        """Return the request of ``together`` workers as a placement group bundle."""
        wanted = {"CPU": self.cpus * together}
        if self.gpus:
            # Ray counts in ten-thousandths, rounding down, and takes only whole numbers above 1.
            share = self.gpus * together
            wanted["GPU"] = share if share < 1 else float(round(share))
        return wanted

    def describe(self) -> str:
        """Return the request as text, for messages."""
        return f"{self.gpus:g} GPU" if self.gpus else f"{self.cpus:g} CPU"


def request_devices(
    devices: int, resources: Mapping[str, float], grows: bool = False, together: int = 1
) -> DeviceRequest:
    """Choose what each of ``devices`` workers reserves: a GPU if the cluster has any, else a CPU.

    With fewer GPUs than devices, workers share them evenly.

    Args:
        devices: number of workers.
        resources: the cluster's total resources, as Ray reports them.
        grows: whether an autoscaler may add CPUs later.
        together: number of workers that must be on one node. Where GPUs are shared, they share whole ones.

    Raises:
        SpecError: the cluster can never provide that many devices; the message says what it has.
    """
    gpus, cpus = resources.get("GPU", 0.0), resources.get("CPU", 0.0)
    if gpus >= 1:
        sharing = -(-devices // int(gpus))
        # A group takes whole GPUs, or a share of one that leaves room for whole groups.
        each = (together // sharing) / together if together >= sharing else 1.0 / (together * -(-sharing // together))
        return DeviceRequest(cpus=min(1.0, cpus / devices), gpus=each)
    if devices > cpus and not grows:
        raise SpecError(
            "parallel",
            f"asks for {devices} devices (stages x replicas x tensor), but the cluster has {cpus:g} CPUs and no GPU",
            f"use at most {int(cpus)}, add nodes, or set RAY_ADDRESS=local to start a Ray for this run alone",
        )
    return DeviceRequest(cpus=1.0, gpus=0.0)


def check_room(devices: int, together: int, request: DeviceRequest, nodes: Iterable[Mapping[str, float]]) -> None:
    """Check that the nodes have room for all groups of ``together`` workers, each group on one node.

    Args:
        devices: number of workers.
        together: number of workers of a group.
        request: what each worker reserves.
        nodes: the total resources of each node.

    Raises:
        SpecError: they have not; the message says what each node has.
    """
    kind = "GPU" if request.gpus else "CPU"
    each = request.bundle(together)[kind]
    has = sorted((node.get(kind, 0.0) for node in nodes), reverse=True)
    of_one = int(1 / each + 1e-3) if request.gpus and each < 1 else 0  # a share of a GPU is never of two
    fit = sum(of_one * int(count) if of_one else int(count / each + 1e-6) for count in has)
    groups = devices // together
    if fit < groups:
        raise SpecError(
            "parallel.tensor",
            f"needs {groups} groups of {each:g} {kind}s, each on one node, and the nodes have room for {fit}: they "
            f"have {', '.join(f'{count:g}' for count in has[:SHOWN])}{', ...' if len(has) > SHOWN else ''} {kind}s",
            f"use nodes whose number of {kind}s is a multiple of {each:g}, or a smaller parallel.tensor",
        )


def local_cpus(devices: int, cores: int) -> int:
    """Return the number of CPUs for a Ray started for this run: one per device, even beyond the number of cores.

    Raises:
        SpecError: there are more than ``OVERSUBSCRIPTION`` devices per core.
    """
    most = cores * OVERSUBSCRIPTION
    if devices > most:
        raise SpecError(
            "parallel",
            f"asks for {devices} devices (stages x replicas x tensor), but this machine's {cores} cores "
            f"give at most {most} stage processes",
            f"use stages * replicas * tensor <= {most}, or connect to a Ray cluster (RAY_ADDRESS)",
        )
    return max(devices, cores)


# Check whether every device of a CPU run has a core of its own.

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
