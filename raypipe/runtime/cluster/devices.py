"""Which resource a device takes from the cluster, and whether the cluster can ever give that many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raypipe.errors import SpecError

OVERSUBSCRIPTION = 8
"""Stage processes per core on a Ray that raypipe itself starts: enough to try any plan on a laptop."""


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """What one stage actor reserves."""

    cpus: float
    gpus: float

    def bundle(self) -> dict[str, float]:
        """As a placement group bundle."""
        wanted = {"CPU": self.cpus}
        if self.gpus:
            wanted["GPU"] = self.gpus
        return wanted

    def describe(self) -> str:
        """For messages."""
        return f"{self.gpus:g} GPU" if self.gpus else f"{self.cpus:g} CPU"


def request_devices(devices: int, resources: Mapping[str, float], grows: bool = False) -> DeviceRequest:
    """What each of ``devices`` actors reserves on a cluster with these total resources: a GPU where there are any.

    With fewer GPUs than devices, stages share them evenly. A cluster that ``grows`` may have the CPUs later.

    Raises:
        SpecError: the cluster can never give that many; says what it has.
    """
    gpus, cpus = resources.get("GPU", 0.0), resources.get("CPU", 0.0)
    if gpus >= 1:
        sharing = -(-devices // int(gpus))
        return DeviceRequest(cpus=min(1.0, cpus / devices), gpus=1.0 if sharing == 1 else 1.0 / sharing)
    if devices > cpus and not grows:
        raise SpecError(
            "parallel",
            f"asks for {devices} devices (stages x replicas x tensor), but the cluster has {cpus:g} CPUs and no GPU",
            f"use fewer: at most {int(cpus)}; add nodes, or set RAY_ADDRESS=local for a Ray of this run's own",
        )
    return DeviceRequest(cpus=1.0, gpus=0.0)


def local_cpus(devices: int, cores: int) -> int:
    """CPUs to give a Ray started for this run alone: one per device, more than the cores if need be.

    Raises:
        SpecError: more processes than the cores can sensibly share.
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
