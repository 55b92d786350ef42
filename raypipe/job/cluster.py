"""The cluster file as typed data: which devices, how many to a host, and the links between them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raypipe.job.spec import Positive, Spec

Above = Annotated[float, Field(gt=0)]


class DeviceModel(Spec):
    """One kind of device, as far as the analytic cost model needs to know it."""

    name: Annotated[str, Field(min_length=1)]
    memory_gib: Above
    """Device memory in GiB."""
    peak_tflops: dict[Literal["float32", "float64", "bfloat16", "float16"], Above]
    """Peak matrix throughput by arithmetic, in 10^12 operations per second; a multiply-add counts two."""
    memory_gb_s: Above
    """Memory bandwidth in 10^9 bytes per second."""
    efficiency: Annotated[float, Field(gt=0, le=1)]
    """Share of the peak that large matrix products reach."""
    half_rate_gflop: Annotated[float, Field(ge=0)] = 0.0
    """Size of a layer's forward, in 10^9 operations, at which half of that share is reached."""


class LinkModel(Spec):
    """A link: a message of n bytes takes ``latency + n / bandwidth``."""

    latency_us: Annotated[float, Field(ge=0)]
    bandwidth_gb_s: Above
    """In 10^9 bytes per second, one direction."""


class ClusterSpec(Spec):
    """One cluster: the whole file. All devices are of one kind."""

    name: Annotated[str, Field(min_length=1)]
    hosts: Positive
    devices_per_host: Positive = 1
    device: DeviceModel
    inside: LinkModel
    """Between two devices of one host."""
    between: LinkModel
    """Between two hosts."""

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.hosts * self.devices_per_host
