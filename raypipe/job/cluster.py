"""The cluster file as typed data: the devices, how many per host, and the links between them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from raypipe.errors import SpecError, check_known
from raypipe.files import shipped, short
from raypipe.job.field_types import MOST, MOST_DEVICES, Devices, Positive, Spec, arithmetic
from raypipe.job.reading import checked, parse_yaml, read_text

Above = Annotated[float, Field(gt=1e-9, le=1e9)]
"""Figures of machines, in the units of their keys: far from any real one, and none whose sums overflow."""
Fraction = Annotated[float, Field(gt=1e-9, le=1)]
Overhead = Annotated[float, Field(ge=0, le=1e9)]
Dtype = Literal["float32", "float64", "bfloat16", "float16", "float8"]
AttentionKernel = Literal["flash", "cudnn"]
Software = Literal["raypipe", "pytorch-2020", "megatron"]

EXAMPLE = "cluster/devices/a100.yaml"
"""A complete cluster file that errors point to."""
DEVICES = "devices"
"""The folder of device descriptions in ``cluster/``."""


class AttentionModel(Spec):
    """How fast an attention kernel is with a causal mask and long sequences, of which only the unmasked half counts.

    In shares of the device's peak for the arithmetic.
    """

    forward: Fraction
    """Share of the peak in the forward."""
    backward: Fraction
    """Share of the peak in the backward."""


class ReservedModel(Spec):
    """Memory that tensors cannot have."""

    context_mib: Overhead
    """Memory of a process before its first tensor: the driver's context, and the code of loaded kernels."""
    workspace_mib: Overhead = 0.0
    """Workspaces of the libraries of products, and pools of CUDA graphs."""
    channels: Positive = 16
    """Channels of a communicator."""
    channel_mib: Overhead = 0.0
    """Buffers of a channel for each neighbour from which it receives: a device has two in a group's rings and trees,
    and one in a communicator between two stages."""
    fragmentation: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the memory that lies in gaps of the allocator where the device is full."""
    headroom: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the memory that plans leave free."""


class DeviceModel(Spec):
    """A kind of device, as the analytic cost model describes it."""

    name: Annotated[str, Field(min_length=1)]
    accelerator_type: str = ""
    """Ray's name of it (``H100``): by it, a plan for several kinds of device finds them in a Ray cluster."""
    memory_gib: Above
    """Device memory in GiB."""
    usable: Annotated[float, Field(gt=0, le=1)] = 0.94
    """Share of the memory that tensors can use; the driver's context, libraries and fragmentation take the rest. Not
    read where ``reserved`` says what these take, or ``usable_gib`` what is left."""
    usable_gib: Above | None = None
    """GiB that tensors can use, if you know: nothing else is then reserved. null: as ``reserved`` or ``usable``
    says."""
    reserved: ReservedModel | None = None
    """Memory that context, libraries, communicators and the allocator take, item by item; null: as ``usable`` says."""
    peak_tflops: Annotated[dict[Dtype, Above], Field(min_length=1)]
    """Peak matrix throughput by dtype, in 10^12 operations per second; a multiply-add counts as two."""
    memory_gb_s: Above
    """Memory bandwidth in 10^9 bytes per second."""
    memory_efficiency: Fraction = 1.0
    """Share of ``memory_gb_s`` that kernels reach which only move memory."""
    efficiency: Fraction
    """Share of the peak that large matrix products reach."""
    efficiency_by_dtype: Annotated[dict[Dtype, Fraction], Field(default_factory=dict)]
    """``efficiency`` of dtypes for which it differs."""
    multiprocessors: Positive | None = None
    """Processors, each of which computes one tile of a product at a time: products are then timed by their shapes, and
    attention by its kernel. null: products of a layer are timed together, attention among them."""
    attention: Annotated[dict[AttentionKernel, AttentionModel], Field(default_factory=dict)]
    """With ``multiprocessors``: speed of attention kernels. ``flash`` is what PyTorch runs, ``cudnn`` Megatron."""
    launch_us: Overhead = 0.0
    """With ``multiprocessors``: time in which the host starts one kernel, so that small layers wait for the host."""
    compiled_launch_us: Overhead = 0.0
    """The same where a compiler has made the kernels."""
    communication_processors: Annotated[int, Field(ge=0, le=MOST)] = 0
    """Of ``multiprocessors``, those that a collective beside computation takes from it."""
    layer_overhead_us: Overhead = 0.0
    """Fixed time of a layer's forward in microseconds: kernel launches, and products too small to fill the device. A
    layer of x operations reaches the share x / (x + overhead * efficiency * peak) of the efficiency."""


class LinkModel(Spec):
    """A link. A message of n bytes takes ``latency + n / bandwidth``."""

    latency_us: Overhead
    """Latency in microseconds."""
    bandwidth_gb_s: Above
    """Bandwidth in one direction, in 10^9 bytes per second."""


class CollectiveModel(LinkModel):
    """The link that collectives between hosts use, and how their library uses it."""

    algorithm: Literal["ring", "rabenseifner", "tree"] | None = None
    """The library's only algorithm; null: it chooses the fastest of the three for each size and group."""
    piece_mib: Above | None = None
    """The library cuts vectors into pieces of this many MiB, each a separate collective with its own latency (25 in
    PyTorch's DistributedDataParallel); null: one piece."""
    at_once: Positive = 1
    """Pieces in flight at the same time. They share the bandwidth; their latencies overlap."""


class HostGroup(Spec):
    """Hosts that are alike."""

    hosts: Devices
    devices_per_host: Devices = 1
    device: DeviceModel
    inside: LinkModel
    """Link between two devices of one host. May be left out if a host has one device."""
    between: LinkModel
    """Link between two hosts. May be left out if there is one host. Between hosts that differ, the slower of their two
    links counts."""
    host_links: Positive = 1
    """Links to other hosts that a host can use at the same time: its network cards."""

    @property
    def devices(self) -> int:
        """Number of devices of these hosts."""
        return self.hosts * self.devices_per_host


class ClusterSpec(HostGroup):
    """A cluster. The keys of hosts and devices describe the first kind of host, ``other_hosts`` all others."""

    name: Annotated[str, Field(min_length=1)]
    other_hosts: Annotated[tuple[HostGroup, ...], Field(strict=False)] = ()
    """Hosts whose devices are of another kind; ``between`` may be left out where it is that of the first kind. The
    planner gives slow devices, and those with little memory, smaller stages."""
    collective: CollectiveModel | None = None
    """Link between hosts for collectives, if they use another path than messages; null: ``between``."""
    software: Software = "raypipe"
    """The framework whose kernels the costs describe. Others than raypipe serve to compare plans with published
    measurements; see ``cost/gpt_work.py``."""

    @model_validator(mode="before")
    @classmethod
    def _links_that_nothing_uses(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        filled = dict(data)
        if filled.get("devices_per_host", 1) == 1 and "between" in filled:
            filled.setdefault("inside", filled["between"])
        others = filled.get("other_hosts")
        if isinstance(others, Sequence) and not isinstance(others, str):
            filled["other_hosts"] = [_as_first(other, filled) for other in others]
        elif filled.get("hosts") == 1 and "inside" in filled:
            filled.setdefault("between", filled["inside"])
        return filled

    @property
    def devices(self) -> int:
        """Total number of devices."""
        return sum(group.hosts * group.devices_per_host for group in (self, *self.other_hosts))

    @property
    def kinds(self) -> tuple[ClusterSpec, ...]:
        """The hosts of each kind as a cluster of their own."""
        shared = {"name": self.name, "collective": self.collective, "software": self.software, "other_hosts": ()}
        return tuple(
            ClusterSpec.model_construct(**{**{key: getattr(group, key) for key in HostGroup.model_fields}, **shared})
            for group in (self, *self.other_hosts)
        )

    def of_one_kind(self, where: str) -> ClusterSpec:
        """Return the cluster, if all its devices are of one kind.

        Raises:
            SpecError: they are not; ``where`` is what needs one kind.
        """
        if self.other_hosts:
            raise SpecError(
                where,
                f"{self.name} has devices of several kinds, and this takes one kind of device",
                "give a cluster file without other_hosts, of the kind that is meant",
            )
        return self

    def resized(self, devices: int) -> ClusterSpec:
        """Return a cluster of ``devices`` devices on hosts of the same kind, or on part of one host if that suffices.

        Raises:
            SpecError: several hosts are needed and the last one would not be full, or hosts differ.
        """
        per_host = self.devices_per_host
        _check_number(devices, "devices")
        if self.other_hosts and devices != self.devices:
            raise SpecError(
                "devices",
                f"{devices} devices of a cluster of {self.devices} whose hosts differ",
                "leave it out, and describe in the cluster file the hosts that may be used",
            )
        if self.other_hosts:
            return self
        if 1 <= devices <= per_host:
            return self.model_copy(update={"hosts": 1, "devices_per_host": devices})
        if devices < 1 or devices % per_host:
            below = max(1, devices // per_host) * per_host
            raise SpecError(
                "devices", f"{devices} devices on hosts of {per_host}", f"use {below} or {below + per_host}"
            )
        return self.model_copy(update={"hosts": devices // per_host})


def _as_first(other: Any, first: Mapping[str, Any]) -> Any:
    """Fill in the links that other hosts may leave out."""
    if not isinstance(other, Mapping):
        return other
    filled = dict(other)
    if "between" in first:
        filled.setdefault("between", first["between"])
    if filled.get("devices_per_host", 1) == 1 and "between" in filled:
        filled.setdefault("inside", filled["between"])
    return filled


def load_cluster(path: str | Path) -> ClusterSpec:
    """Read and check a cluster file, found as ``cluster_file`` says.

    Raises:
        SpecError: ``where`` is the file and the key.
    """
    file = cluster_file(Path(path))
    return cluster_from(parse_yaml(read_text(file, "cluster", EXAMPLE), str(file)), str(file))


def cluster_file(path: Path) -> Path:
    """Return the file that a cluster's path means.

    A path that exists is taken as it is. Device descriptions used to be in ``cluster/`` itself, so
    ``cluster/a100.yaml`` is ``cluster/devices/a100.yaml`` where only that exists. The bare name of a description
    (``a100``) is found wherever raypipe is installed.

    Raises:
        SpecError: a bare name that is neither a file's nor a description's.
    """
    if path.exists():
        return path
    moved = path.parent / DEVICES / path.name
    if moved.is_file():
        return moved
    if path.parent == Path() and not path.suffix:
        named = {file.stem: file for file in (shipped("cluster") / DEVICES).glob("*.yaml")}
        check_known(SpecError, "cluster", str(path), named)
        return named[str(path)]
    return path


def moved_note(path: Path) -> str | None:
    """Return what to tell who gave the path of a description that has moved; None where it is where they say."""
    result = cluster_file(path)
    if result == path or not path.suffix:
        return None
    return f"note: {path} has moved to {result}; the old path keeps working"


def cluster_from(mapping: object, where: str = "cluster") -> ClusterSpec:
    """Check a cluster given as plain data (as YAML gives it); ``where`` names its origin in errors."""
    result = checked(mapping, ClusterSpec, where, EXAMPLE)
    _check_number(result.devices, f"{where}: hosts")
    for group in (result, *result.other_hosts):
        _check_parts(group.device, where)
    return result


def _check_parts(device: DeviceModel, where: str) -> None:
    """Check that what is a part of another figure is no more than that."""
    if device.usable_gib is not None and device.usable_gib > device.memory_gib:
        why = f"{device.usable_gib:g} GiB of a memory of {device.memory_gib:g}"
        raise SpecError(f"{where}: device.usable_gib", why, f"use at most {device.memory_gib:g}")
    taken, most = device.communication_processors, device.multiprocessors or 0
    if taken and taken >= most:
        fix = f"use fewer than {most}" if most else "give multiprocessors too"
        raise SpecError(f"{where}: device.communication_processors", f"{taken} of {most} multiprocessors", fix)


def _check_number(devices: int, where: str) -> None:
    if devices > MOST_DEVICES:
        raise SpecError(where, f"{short(str(devices))} devices in all", f"use at most {MOST_DEVICES}")


# The peak of a device that is running: of its description in ``cluster/devices/``, or as the user says.

GIVEN = "RAYPIPE_PEAK_TFLOPS"
"""Environment variable with the peak of a device that no description names, in 10^12 operations per second."""
_MOST_TFLOPS = 1e9


def peak_flops_s(device: str, dtype: str) -> float | None:
    """Peak operations per second of the device that calls itself so, in this arithmetic; None where nobody knows.

    Raises:
        SpecError: ``RAYPIPE_PEAK_TFLOPS`` is not a number above 0.

    >>> peak_flops_s("NVIDIA A100-SXM4-80GB", "bfloat16")
    312000000000000.0
    """
    if given := os.environ.get(GIVEN):
        return _given(given)
    wanted = words_of(device)
    for file in sorted((shipped("cluster") / DEVICES).glob("*.yaml")) if wanted else ():
        try:
            described = load_cluster(file).device
        except SpecError:  # one of the user's own beside ours
            continue
        # Drivers leave words out: "NVIDIA H200" is an "H200 SXM5 141 GB". One that they add is another device.
        if wanted <= words_of(described.name):
            return next(
                (peak * 1e12 for name, peak in described.peak_tflops.items() if name == arithmetic(dtype)), None
            )
    return None


def _given(text: str) -> float:
    """Read what ``GIVEN`` holds, in operations per second.

    Raises:
        SpecError: it is not a number above 0, or not a plausible one.

    >>> _given("312")
    312000000000000.0
    """
    try:
        peak = float(text)
    except ValueError:
        peak = math.nan
    if not 0 < peak <= _MOST_TFLOPS:
        why = f'"{short(text)}" is not a peak in TFLOP/s'
        raise SpecError(GIVEN, why, f"set it to a number above 0 and at most {_MOST_TFLOPS:g}, or unset it")
    return peak * 1e12


def words_of(device: str) -> frozenset[str]:
    """Return what a device's name says, however drivers and data sheets spell it.

    >>> sorted(words_of("NVIDIA H100 80GB HBM3") - words_of("H100 SXM5 80 GB"))
    []
    >>> sorted(words_of("NVIDIA H100 PCIe") - words_of("H100 SXM5 80 GB"))
    ['PCIE']
    """
    words = re.findall(r"[A-Z0-9]+", re.sub(r"(\d) +GB", r"\1GB", device.upper()))
    return frozenset(word for word in words if word != "NVIDIA" and not word.startswith("HBM"))
