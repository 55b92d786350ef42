"""Reserve a run's devices: wait for them, keep them over all of its attempts, and release them at its end.

The process that starts a run reserves them, because it outlives Ray Train's controller and the driver. The attempt
after a killed one then still has its devices, and no other job can take them in between.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ray
from ray.autoscaler.sdk import request_resources
from ray.util import get_placement_group, list_named_actors, placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypipe.compat import ray_private
from raypipe.cost.hosts import Numbering
from raypipe.errors import DevicesError
from raypipe.runtime.hosts.devices import DeviceRequest
from raypipe.runtime.hosts.rank_order import check_kinds, located_bundles, resource_of

Notify = Callable[[str], None]
FIRST_S, NEXT_S, LATER_S = 1.0, 5.0, 30.0
"""When a wait is first reported; the interval of reports in the first minute; and the interval after that."""
LITTLE = 0.001
"""Share of a node's ``accelerator_type`` that a bundle reserves: a mark, of which a node has 1."""
POLL_S = 1
"""Ray's timeout for a placement group is in whole seconds."""
SEEN_FREE_S = 5
"""How long devices that were seen free may take to be reserved; another job may have come first."""
NAMESPACE = "raypipe"
"""Of actors that outlive their creator; Ray warns the user of such ones in the namespace that a job has by default."""
NODE_ID = "ray.io/node-id"
"""Label of a node with its id."""


def silent(_message: str) -> None:
    """Ignore the message."""


class Part(NamedTuple):
    """A placement group of a reservation."""

    name: str
    group: PlacementGroup


class Place(NamedTuple):
    """One bundle of a reservation."""

    part: str
    """Name of its placement group."""
    number: int
    """Its index there."""


Kept = dict[tuple[Place, int], Any]
"""Actors that wait for a plan, by the bundle they run in and their number there."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Placement groups with one bundle per tensor-parallel group of devices.

    It is one group, so that a run has all of its devices or none. An elastic run, which does with fewer, has one per
    node where it can (``by_node``): giving back the devices of one node then leaves the processes on others alone.
    """

    parts: tuple[Part, ...]
    run_id: str
    """Eight hexadecimal digits; the id of an attempt appends ``-`` and four more."""
    devices: int
    request: DeviceRequest
    """What each device has of its bundle."""
    together: int = 1
    """Devices of each bundle."""
    kinds: tuple[str, ...] = ()
    """The kind of device that each bundle asks for, in the planner's order; empty: any will do."""
    held: bool = False
    """Whether the devices stay reserved when the workers on them stop, for those of another attempt."""

    def for_attempt(self) -> Reservation:
        """Return the same reservation with a new id, for one attempt at the run, which does not end it."""
        return replace(self, run_id=f"{self.run_id}-{uuid.uuid4().hex[:4]}", held=True)

    def wait(self, timeout_s: float | None, notify: Notify) -> None:
        """Wait until the devices are reserved; ``notify`` is called with a sentence now and then.

        Raises:
            DevicesError: they were not free within ``timeout_s``.
        """
        begun = time.monotonic()
        due = FIRST_S
        while True:
            if all(part.group.wait(POLL_S) for part in self.parts):
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

    def in_rank_order(self, numbering: Numbering | None = None) -> list[int]:
        """Return the bundle of each rank, as a plan numbers its devices; by default host by host."""
        gpus = self.request.bundle(self.together).get("GPU", 0.0)
        bundles = located_bundles((part.group for part in self.parts), gpus, self.kinds)
        numbers = range(len(bundles)) if numbering is None else numbering.by_rank()
        return [bundles[number].number for number in numbers for _ in range(self.together)]

    def places(self) -> list[Place]:
        """Return all bundles; ``in_rank_order`` numbers them so."""
        return [Place(part.name, number) for part in self.parts for number in range(part.group.bundle_count)]

    def strategy(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        """Return how Ray places an actor in one of the bundles."""
        name, number = self.places()[bundle]
        group = next(part.group for part in self.parts if part.name == name)
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)

    def of_attempts(self) -> list[Any]:
        """Return the workers that attempts at the run have started and that live, with processes that stood by."""
        result = []
        for one in list_named_actors(all_namespaces=True):
            if one["namespace"] == NAMESPACE and f" · {self.run_id}-" in one["name"]:
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    result.append(ray.get_actor(**one))
        return result

    def is_broken(self) -> bool:
        """Return whether some of the devices are on no living node now; Ray may find others for them."""
        return any(_nodes_of(part) is None for part in self.parts)

    def nodes(self) -> set[str]:
        """Return the ids of the nodes on which the devices are."""
        return {
            node for part in self.parts for node in placement_group_table(part.group)["bundles_to_node_id"].values()
        }

    def give_back(self) -> None:
        """Release the devices; Ray ends the actors that still run there."""
        for part in self.parts:
            remove_placement_group(part.group)

    def without(self, going: Collection[str]) -> Reservation:
        """Give back the parts that are broken or have devices on the nodes ``going``; return what stays."""
        stay = []
        for part in self.parts:
            on = _nodes_of(part)
            if on is not None and on.isdisjoint(going):
                stay.append(part)
        return self._only(stay)

    def at_most(self, devices: int) -> Reservation:
        """Give back the parts that are too many for ``devices`` devices, the first ones last; return what stays."""
        stay, room = [], devices // self.together
        for part in self.parts:
            if part.group.bundle_count <= room:
                stay.append(part)
                room -= part.group.bundle_count
        return self._only(stay)

    def _only(self, stay: Sequence[Part]) -> Reservation:
        for part in self.parts:
            if part not in stay:
                remove_placement_group(part.group)
        return replace(self, parts=tuple(stay), devices=sum(part.group.bundle_count for part in stay) * self.together)

    def with_more(self, devices: int) -> Reservation | None:
        """Reserve free devices of some nodes beside these, ``devices`` in all; None if there are too few now."""
        bundles = (devices - self.devices) // self.together
        more = _by_node(bundles, self.request.bundle(self.together), self.run_id)
        return None if more is None else replace(self, parts=(*self.parts, *more), devices=devices)


def _nodes_of(part: Part) -> set[str] | None:
    """Return the nodes of a part; None if one is lost."""
    table = placement_group_table(part.group)
    on = set(table["bundles_to_node_id"].values())
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return on if table["state"] == "CREATED" and on <= alive else None


def reserve(
    devices: int,
    request: DeviceRequest,
    timeout_s: float | None,
    notify: Notify = silent,
    together: int = 1,
    kinds: tuple[str, ...] = (),
    by_node: bool = False,
    run_id: str | None = None,
) -> Reservation:
    """Reserve ``devices`` devices, waiting for them as ``Reservation.wait`` does.

    Each ``together`` of them are on one node: their bundle is one, which is stronger than a strategy of Ray's.

    Where ``kinds`` names kinds of device, each bundle is on a node of its kind.

    With ``by_node`` and free devices of any kind, those of each node are reserved apart. ``run_id`` is that of the run,
    where it has one.

    Raises:
        DevicesError: they were not free within ``timeout_s``.
        ClusterError: the cluster has no such kinds of device, and does not grow.
    """
    end_idle()
    run_id = run_id or uuid.uuid4().hex[:8]
    bundles = [request.bundle(together) for _ in range(devices // together)]
    if by_node and not kinds:
        parts = _by_node(len(bundles), bundles[0], run_id)
        if parts is not None:
            return Reservation(parts, run_id, devices, request, together)
    if kinds:
        each = DeviceRequest(bundles[0]["CPU"], bundles[0].get("GPU", 0.0))
        if not autoscales():
            check_kinds(kinds, each, (node["Resources"] for node in ray.nodes() if node["Alive"]))
        for bundle, kind in zip(bundles, kinds, strict=True):
            if kind:
                bundle[resource_of(kind)] = LITTLE
    reservation = Reservation((_part(run_id, bundles, "PACK"),), run_id, devices, request, together, kinds)
    try:
        reservation.wait(timeout_s, notify)
    except BaseException:
        reservation.give_back()
        raise
    return reservation


class Idle(NamedTuple):
    """Workers that measured their devices and wait there for the run, so that it need not start others."""

    reservation: Reservation
    actors: Kept
    cluster: str
    """Address of the cluster that they are part of."""


_idle: list[Idle] = []
"""At most one, because whatever else this process reserves may need its devices."""


def leave_idle(reservation: Reservation, actors: Kept) -> None:
    """Leave workers on their devices until this process next reserves any."""
    end_idle()
    _idle.append(Idle(reservation, actors, ray.get_runtime_context().gcs_address))


def is_idle(reservation: Reservation) -> bool:
    """Return whether workers were left on these devices."""
    return any(idle.reservation is reservation for idle in _idle)


def take_idle(devices: int, request: DeviceRequest) -> Idle | None:
    """Return the workers that were left, if they have this many devices of this kind; end them otherwise."""
    if _idle and ray.get_runtime_context().gcs_address == _idle[0].cluster:
        result = _idle[0].reservation
        if (result.devices, result.request) == (devices, request) and not result.is_broken():
            return _idle.pop()
    end_idle()
    return None


def end_idle() -> None:
    """End the workers that were left, if any, and release their devices."""
    while _idle:
        idle = _idle.pop()
        if ray.is_initialized() and ray.get_runtime_context().gcs_address == idle.cluster:
            idle.reservation.give_back()


def reserved_by(
    run_id: str, parts: Sequence[str], devices: int, request: DeviceRequest, together: int, kinds: tuple[str, ...]
) -> Reservation:
    """Return what another process of this Ray job reserved, by its parts' names; the rest is as for ``reserve``.

    Raises:
        DevicesError: it has given the devices back.
    """
    try:
        result = tuple(Part(name, get_placement_group(name)) for name in parts)
    except ValueError:
        raise DevicesError("devices", f"those reserved for run {run_id} were given back", "resume the run") from None
    return Reservation(result, run_id, devices, request, together, kinds)


def _by_node(bundles: int, bundle: dict[str, float], run_id: str) -> tuple[Part, ...] | None:
    """Reserve free devices, with a placement group per node; None if there are too few, or another job takes them."""
    free, takes, left = free_bundles(bundle) or {}, {}, bundles
    while left and free:
        # The smallest node that has room for all that is left, else the largest: as few nodes as possible.
        node = min(free, key=lambda n: (free[n] < left, free[n] if free[n] >= left else -free[n], n))
        takes[node] = min(free.pop(node), left)
        left -= takes[node]
    if left:
        return None
    parts = tuple(
        _part(run_id, [bundle] * count, "STRICT_PACK", bundle_label_selector=[{NODE_ID: node}] * count)
        for node, count in takes.items()
        if count
    )
    if all(part.group.wait(SEEN_FREE_S) for part in parts):
        return parts
    for part in parts:
        remove_placement_group(part.group)
    return None


def _part(run_id: str, bundles: list[dict[str, float]], strategy: str, **options: Any) -> Part:
    name = f"raypipe {run_id}-{uuid.uuid4().hex[:4]}"
    return Part(name, placement_group(bundles, strategy=strategy, name=name, **options))


def shortage(devices: int, request: DeviceRequest) -> str:
    """Say what is requested and what is free: ``needs 2 CPUs, 0 free``."""
    kind, each = ("GPU", request.gpus) if request.gpus else ("CPU", request.cpus)
    needed = devices * each
    free = ray.available_resources().get(kind, 0.0)
    return f"needs {needed:g} {kind}{'s' * (needed != 1)}, {free:g} free"


# Nodes that come and go: whether an autoscaler may add some, which ones will go, and what is free on the others.
#
# Ray has no public call for the first, so it is read from what its autoscalers (v1 and v2) publish for ``ray status``.
# A cluster without an autoscaler has a v1 monitor too, but that one knows no node types and names each node by its id.

LISTENS_S = 2.0
"""Time that a process of Ray has to take a connection."""
NODE_GROUP = "ray.io/node-group"
"""Label of nodes that an autoscaler or KubeRay has started."""
_BY_ID = re.compile(r"node_[0-9a-f]+")


def listens(address: str) -> bool:
    """Return whether something listens at the address of a Ray cluster, or a node, that this process is part of."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=LISTENS_S).close()
    except OSError:
        return False
    return True


def gone(nodes: Collection[str]) -> set[str]:
    """Return those of nodes whose raylet takes no connection: all processes there end with it.

    Ray itself needs about 15 s to notice that (``RAY_health_check_period_ms`` and what goes with it).
    """
    at = {node["NodeID"]: f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in ray.nodes()}
    return {node for node in nodes if node in at and not listens(at[node])}


def autoscales() -> bool:
    """Return whether an autoscaler adds nodes to the cluster that this process is connected to."""
    report = ray_private.autoscaler_report()
    if report is not None:
        return knows_node_types(report)
    grouped = any(node.get("Labels", {}).get(NODE_GROUP) for node in ray.nodes() if node["Alive"])
    return grouped and ray_private.second_autoscaler_runs(ray.get_runtime_context().gcs_address)


@contextmanager
def requested(each: DeviceRequest, most: int | None) -> Iterator[None]:
    """Ask an autoscaler, if there is one, to have room for ``most`` workers while the block lasts."""
    asks = most is not None and autoscales()
    if asks:
        request_resources(bundles=[each.bundle()] * (most or 0))
    try:
        yield
    finally:
        if asks:
            request_resources(bundles=[])


def free_workers(request: DeviceRequest) -> int:
    """Return how many more workers there is room for now, on nodes that stay."""
    kind = "GPU" if request.gpus else "CPU"
    each = {kind: request.bundle()[kind]}
    free = free_bundles(each)
    return _fit(ray.available_resources(), each) if free is None else sum(free.values())


def free_bundles(bundle: Mapping[str, float]) -> dict[str, int] | None:
    """Return how many of a bundle there is room for now on each node that stays, by Ray's id of the node.

    None if Ray does not say what is free on a node.
    """
    free = ray_private.available_per_node()
    if free is None:
        return None
    stay = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - ray_private.draining_nodes()
    return {node: _fit(has, bundle) for node, has in free.items() if node in stay}


def _fit(has: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    return min(int(has.get(kind, 0.0) / each + 1e-6) for kind, each in bundle.items() if each)


def knows_node_types(status: Mapping[str, Any]) -> bool:
    """Return whether a v1 monitor's report names node types, of which an autoscaler can start more nodes."""
    report = status.get("autoscaler_report") or {}
    types = {*(report.get("node_type_mapping") or {}).values(), *(report.get("active_nodes") or ())}
    return any(_BY_ID.fullmatch(name) is None for name in types) or bool(report.get("pending_launches"))
