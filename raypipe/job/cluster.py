"""The cluster file as typed data: which devices, how many to a host, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from raypipe.errors import SpecError
from raypipe.job.field_types import Positive, Spec
from raypipe.job.load import read_text
from raypipe.job.validation_errors import describe, first_problem
from raypipe.job.yaml_text import parse_yaml

Above = Annotated[float, Field(gt=0)]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]
Software = Literal["raypipe", "pytorch-2020", "megatron"]

EXAMPLE = "cluster/a100.yaml"
"""A whole cluster, for whoever wonders how one looks."""


class DeviceModel(Spec):
    """One kind of device, as far as the analytic cost model needs to know it."""

    name: Annotated[str, Field(min_length=1)]
    memory_gib: Above
    """Device memory in GiB."""
    usable: Annotated[float, Field(gt=0, le=1)] = 0.94
    """Share of it that tensors can fill; the rest goes to the driver's context, libraries and fragmentation."""
    peak_tflops: Annotated[dict[Dtype, Above], Field(min_length=1)]
    """Peak matrix throughput by arithmetic, in 10^12 operations per second; a multiply-add counts two."""
    memory_gb_s: Above
    """Memory bandwidth in 10^9 bytes per second."""
    efficiency: Annotated[float, Field(gt=0, le=1)]
    """Share of the peak that large matrix products reach."""
    efficiency_by_dtype: Annotated[dict[Dtype, Annotated[float, Field(gt=0, le=1)]], Field(default_factory=dict)]
    """Where an arithmetic reaches another share."""
    layer_overhead_us: Annotated[float, Field(ge=0)] = 0.0
    """Fixed time of a layer's forward: launches, and products too small to fill the device. So a layer of x operations
    reaches the share x / (x + overhead * efficiency * peak) of what large ones reach."""


class LinkModel(Spec):
    """A link: a message of n bytes takes ``latency + n / bandwidth``."""

    latency_us: Annotated[float, Field(ge=0)]
    bandwidth_gb_s: Annotated[float, Field(gt=1e-9)]
    """In 10^9 bytes per second, one direction; more than a byte per second."""


class CollectiveModel(LinkModel):
    """The path of collectives between hosts, and how the library that runs them goes about it."""

    algorithm: Literal["ring", "rabenseifner", "tree"] | None = None
    """The one it has; null: the fastest of the three for each size and group."""
    piece_mib: Above | None = None
    """It cuts what is summed into pieces of so many MiB, each a collective of its own with its own latency (PyTorch's
    DistributedDataParallel: 25); null: one piece."""
    at_once: Positive = 1
    """Pieces under way at the same time. They share the bandwidth; their latencies pass side by side."""


class ClusterSpec(Spec):
    """One cluster: the whole file. All devices are of one kind."""

    name: Annotated[str, Field(min_length=1)]
    hosts: Positive
    devices_per_host: Positive = 1
    device: DeviceModel
    inside: LinkModel
    """Between two devices of one host. May be left out where a host has one device."""
    between: LinkModel
    """Between two hosts. May be left out where there is one host."""
    collective: CollectiveModel | None = None
    """Between hosts as collectives see it, where another path carries them than messages; null: ``between``."""
    host_links: Positive = 1
    """Such links that a host can fill at the same time: its network cards."""
    software: Software = "raypipe"
    """Whose kernels computed costs are those of. Another's than raypipe's own is for holding plans against what others
    measured on that machine; see ``cost/gpt_work.py``."""

    @model_validator(mode="before")
    @classmethod
    def _links_that_nothing_uses(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        whole = dict(data)
        if whole.get("devices_per_host", 1) == 1 and "between" in whole:
            whole.setdefault("inside", whole["between"])
        if whole.get("hosts") == 1 and "inside" in whole:
            whole.setdefault("between", whole["inside"])
        return whole

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.hosts * self.devices_per_host

    def resized(self, devices: int) -> ClusterSpec:
        """The same kind of hosts, as many as ``devices`` take; part of one host where that is enough.

        Raises:
            SpecError: several hosts, and the last one would not be full.
        """
        per_host = self.devices_per_host
        if 1 <= devices <= per_host:
            return self.model_copy(update={"hosts": 1, "devices_per_host": devices})
        if devices < 1 or devices % per_host:
            below = max(1, devices // per_host) * per_host
            raise SpecError(
                "devices", f"{devices} devices on hosts of {per_host}", f"use {below} or {below + per_host}"
            )
        return self.model_copy(update={"hosts": devices // per_host})


def load_cluster(path: str | Path) -> ClusterSpec:
    """Read and check a cluster file.

    Raises SpecError, whose ``where`` is the file and the key.
    """
    return cluster_from(parse_yaml(read_text(Path(path), "cluster", EXAMPLE), str(path)), str(path))


def cluster_from(mapping: object, where: str = "cluster") -> ClusterSpec:
    """Check a cluster given as plain data (as YAML gives it); ``where`` names its origin in errors."""
    if not isinstance(mapping, Mapping):
        raise SpecError(where, f"holds {describe(mapping)} instead of keys and values", f"see {EXAMPLE}")
    try:
        return ClusterSpec.model_validate(dict(mapping))
    except ValidationError as invalid:
        key, why, fix = first_problem(invalid, ClusterSpec, EXAMPLE)
        raise SpecError(f"{where}: {key}", why, fix) from None
