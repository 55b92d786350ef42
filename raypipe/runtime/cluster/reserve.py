"""Reserve a run's devices: wait for them, keep them over all of its attempts, and release them at its end.

The process that starts a run reserves them, because it outlives Ray Train's controller and the driver. The attempt
after a killed one then still has its devices, and no other job can take them in between.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

import ray
from ray.util import get_placement_group, list_named_actors, placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raypipe.errors import DevicesError
from raypipe.runtime.cluster.autoscaler import autoscales
from raypipe.runtime.cluster.devices import DeviceRequest
from raypipe.runtime.cluster.rank_order import ANY_KINDS, DeviceKinds, bundles_in_rank_order, check_kinds, resource_of

Notify = Callable[[str], None]
FIRST_S, NEXT_S, LATER_S = 1.0, 5.0, 30.0
"""When a wait is first reported; the interval of reports in the first minute; and the interval after that."""
LITTLE = 0.001
"""Share of a node's ``accelerator_type`` that a bundle reserves: a mark, of which a node has 1."""
POLL_S = 1
"""Ray's timeout for a placement group is in whole seconds."""


def silent(_message: str) -> None:
    """Ignore the message."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A placement group with one bundle per tensor-parallel group of devices."""

    group: PlacementGroup
    run_id: str
    """Eight hexadecimal digits; the id of an attempt appends ``-`` and four more."""
    devices: int
    request: DeviceRequest
    """What each device has of its bundle."""
    together: int = 1
    """Devices of each bundle."""
    kinds: DeviceKinds = ANY_KINDS
    """The kinds of device that the bundles ask for."""

    def for_attempt(self) -> Reservation:
        """Return the same reservation with a new id, for one attempt at the run."""
        return replace(self, run_id=f"{self.run_id}-{uuid.uuid4().hex[:4]}")

    def wait(self, timeout_s: float | None, notify: Notify) -> None:
        """Wait until the devices are reserved; ``notify`` is called with a sentence now and then.

        Raises:
            DevicesError: they were not free within ``timeout_s``.
        """
        begun = time.monotonic()
        due = FIRST_S
        while True:
            if self.group.wait(POLL_S):
                return
            waited = time.monotonic() - begun
            if timeout_s is not None and waited >= timeout_s:
                raise DevicesError(
                    "devices",
                    f"{self.devices} x {self.request.describe()} were not free within {timeout_s:.0f} s",
                    "wait for other jobs to end, raise train.wait_for_devices_s (null: no limit), "
                    "or ask for fewer stages or replicas",
                )
            if waited >= due:
                due = waited + (NEXT_S if waited < 60 else LATER_S)
                notify(f"{shortage(self.devices, self.request)}, waiting {int(waited) // 60}:{int(waited) % 60:02d}")

    def in_rank_order(self) -> list[int]:
        """Return the bundle of each rank: ranks follow one another on a host, and hosts after one another."""
        bundles = bundles_in_rank_order(self.group, self.request.bundle(self.together).get("GPU", 0.0), self.kinds)
        return [bundle.number for bundle in bundles for _ in range(self.together)]

    def end_attempts(self) -> None:
        """Kill the workers of attempts whose driver was killed."""
        for name in list_named_actors():
            if f" · {self.run_id}-" in name:
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    ray.kill(ray.get_actor(name))

    def is_broken(self) -> bool:
        """Return whether some of the devices are on no living node now; Ray may find others for them."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return placement_group_table(self.group)["state"] != "CREATED" or not self.nodes() <= alive

    def nodes(self) -> set[str]:
        """Return the ids of the nodes on which the devices are."""
        return set(placement_group_table(self.group)["bundles_to_node_id"].values())

    def give_back(self) -> None:
        """Release the devices; Ray ends the actors that still run there."""
        remove_placement_group(self.group)


def reserve(
    devices: int, request: DeviceRequest, timeout_s: float | None, notify: Notify = silent, together: int = 1,
    kinds: DeviceKinds = ANY_KINDS,
) -> Reservation:  # fmt: skip
    """Reserve ``devices`` devices, waiting for them as ``Reservation.wait`` does.

    Each ``together`` of them are on one node: their bundle is one, which is stronger than a strategy of Ray's.

    Where ``kinds`` names kinds of device, each bundle is on a node of its kind.

    Raises:
        DevicesError: they were not free within ``timeout_s``.
        ClusterError: the cluster has no such kinds of device, and does not grow.
    """
    run_id = uuid.uuid4().hex[:8]
    bundles = [request.bundle(together) for _ in range(devices // together)]
    if kinds.bundles:
        each = DeviceRequest(bundles[0]["CPU"], bundles[0].get("GPU", 0.0))
        if not autoscales():
            check_kinds(kinds, each, (node["Resources"] for node in ray.nodes() if node["Alive"]))
        for bundle, kind in zip(bundles, kinds.bundles, strict=True):
            if kind:
                bundle[resource_of(kind)] = LITTLE
    group = placement_group(bundles, strategy="PACK", name=_name(run_id))
    reservation = Reservation(group, run_id, devices, request, together, kinds)
    try:
        reservation.wait(timeout_s, notify)
    except BaseException:
        reservation.give_back()
        raise
    return reservation


def reserved_by(run_id: str, devices: int, request: DeviceRequest, together: int, kinds: DeviceKinds) -> Reservation:
    """Return what another process of this Ray job reserved under an id; the other arguments are those of ``reserve``.

    Raises:
        DevicesError: it has given the devices back.
    """
    try:
        group = get_placement_group(_name(run_id))
    except ValueError:
        raise DevicesError("devices", f"those reserved for run {run_id} were given back", "resume the run") from None
    return Reservation(group, run_id, devices, request, together, kinds)


def _name(run_id: str) -> str:
    return f"raypipe {run_id}"


def shortage(devices: int, request: DeviceRequest) -> str:
    """Say what is requested and what is free: ``needs 2 CPUs, 0 free``."""
    kind, each = ("GPU", request.gpus) if request.gpus else ("CPU", request.cpus)
    needed = devices * each
    free = ray.available_resources().get(kind, 0.0)
    return f"needs {needed:g} {kind}{'s' * (needed != 1)}, {free:g} free"
