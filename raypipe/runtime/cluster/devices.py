"""Choose the Ray resources each device reserves, and check that the cluster can provide enough of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raypipe.errors import SpecError

OVERSUBSCRIPTION = 8
"""Workers per core on a Ray that raypipe itself starts: enough to try any plan on a laptop."""


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """The Ray resources that one worker reserves."""

    cpus: float
    gpus: float

    def bundle(self) -> dict[str, float]:
        """Return the request as a placement group bundle."""
        wanted = {"CPU": self.cpus}
        if self.gpus:
            wanted["GPU"] = self.gpus
        return wanted

    def describe(self) -> str:
        """Return the request as text, for messages."""
        return f"{self.gpus:g} GPU" if self.gpus else f"{self.cpus:g} CPU"


def request_devices(devices: int, resources: Mapping[str, float], grows: bool = False) -> DeviceRequest:
    """Choose what each of ``devices`` workers reserves: a GPU if the cluster has any, else a CPU.

    With fewer GPUs than devices, workers share them evenly.

    Args:
        devices: number of workers.
        resources: the cluster's total resources, as Ray reports them.
        grows: whether an autoscaler may add CPUs later.

    Raises:
        SpecError: the cluster can never provide that many devices; the message says what it has.
    """
    gpus, cpus = resources.get("GPU", 0.0), resources.get("CPU", 0.0)
    if gpus >= 1:
        sharing = -(-devices // int(gpus))
        return DeviceRequest(cpus=min(1.0, cpus / devices), gpus=1.0 if sharing == 1 else 1.0 / sharing)
    if devices > cpus and not grows:
        raise SpecError(
            "parallel",
            f"asks for {devices} devices (stages x replicas x tensor), but the cluster has {cpus:g} CPUs and no GPU",
            f"use at most {int(cpus)}, add nodes, or set RAY_ADDRESS=local to start a Ray for this run alone",
        )
    return DeviceRequest(cpus=1.0, gpus=0.0)


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
