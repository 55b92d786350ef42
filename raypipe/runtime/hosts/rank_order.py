"""Give ranks to reserved bundles: hosts one after another, and the GPUs of a host in their order.

The planner numbers devices host by host, but Ray places bundles in an order of its own. So a worker group's bundles
are located first and sorted as the planner numbers devices (``in_planners_order``); which of them a rank gets is what
the plan's ``Numbering`` says. A bundle lies on one node, and each holds one tensor-parallel group: these never straddle
nodes. Which of a bundle's GPUs its processes get is up to Ray.

A plan for several kinds of device asks each of its bundles for one kind, by the resource ``accelerator_type:KIND`` that
Ray gives to nodes; then bundles are in the plan's order of kinds, and every copy takes its share of each kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from itertools import accumulate
from typing import NamedTuple

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypipe.cost.hosts import Numbering
from raypipe.errors import ClusterError
from raypipe.plan.plan import Plan
from raypipe.runtime.hosts.devices import DeviceRequest

GpuId = int | str
ACCELERATOR = "accelerator_type:"
PROBE_S = 120.0
"""Time that the tasks that ask for GPU ids have to start."""


class Bundle(NamedTuple):
    """A bundle of a reservation, and where it is."""

    number: int
    """Its index in the reservation."""
    node: str
    """Ray's id of its node."""
    address: str = ""
    """The node's IP address."""
    gpus: tuple[GpuId, ...] = ()
    """Ids of its GPUs on that node."""


def host_by_host(bundles: Iterable[Bundle]) -> list[Bundle]:
    """Sort bundles of one kind of device as the planner numbers them.

    The node with most bundles comes first, so that all but the last have equally many where hosts are alike; among
    equals the one with the lower address. Inside a node, bundles are in the order of their GPUs.
    """
    bundles = list(bundles)
    on_node = Counter(bundle.node for bundle in bundles)

    def key(bundle: Bundle) -> tuple[object, ...]:
        return (-on_node[bundle.node], *_address_key(bundle.address), bundle.node, _gpu_key(bundle), bundle.number)

    return sorted(bundles, key=key)


def in_planners_order(bundles: Iterable[Bundle], kinds: Sequence[str] = ()) -> list[Bundle]:
    """Sort bundles as the planner numbers devices; ``kinds`` has the kind of each, by its number, where it matters."""
    bundles = list(bundles)
    if not kinds:
        return host_by_host(bundles)
    return [
        bundle
        for kind in dict.fromkeys(kinds)
        for bundle in host_by_host([one for one in bundles if kinds[one.number] == kind])
    ]


def by_number(by_rank: Sequence[str], numbering: Numbering, together: int) -> list[str]:
    """Return what is known of each rank in the planner's order of their devices; each has ``together`` ranks."""
    at = {number: device for device, number in enumerate(numbering.by_rank())}
    return [by_rank[at[n] * together + m] for n in range(len(at)) for m in range(together)]


def kinds_of(plan: Plan) -> tuple[str, ...]:
    """Return the kind of device of each bundle that a plan is for, by its number; empty: any device will do."""
    return () if plan.made_for is None else plan.made_for.bundle_kinds(plan.parallel.tensor)


def resource_of(kind: str) -> str:
    """Return the resource that Ray gives to every node with this kind of accelerator."""
    return f"{ACCELERATOR}{kind}"


def kind_of_node(resources: Mapping[str, float]) -> str:
    """Return the kind of accelerator that a node's resources name; empty if they name none."""
    return min((name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR)), default="")


def kinds_on_hosts(nodes: Sequence[str], counts: Sequence[int]) -> tuple[str, ...]:
    """Return the kind of accelerator on each host.

    Args:
        nodes: Ray's id of the node of every device.
        counts: number of devices of each host, in the same order.
    """
    of_node = {node["NodeID"]: kind_of_node(node["Resources"]) for node in ray.nodes()}
    starts = accumulate(counts, initial=0)
    return tuple(of_node.get(nodes[start], "") for start, _ in zip(starts, counts, strict=False))


def devices_of_kinds(request: DeviceRequest, nodes: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """Count the devices of each kind of accelerator ("" where Ray names none), by the total resources of the nodes."""
    what, each = ("GPU", request.gpus) if request.gpus else ("CPU", request.cpus)
    has: Counter[str] = Counter()
    for node in nodes:
        has[kind_of_node(node)] += int(node.get(what, 0.0) / each + 1e-6) if each else 0
    return {kind: count for kind, count in sorted(has.items()) if count}


def check_kinds(kinds: Sequence[str], bundle: DeviceRequest, nodes: Iterable[Mapping[str, float]]) -> None:
    """Check that nodes have enough devices of every kind that a plan is for.

    Args:
        kinds: of each bundle of the plan.
        bundle: what each bundle reserves.
        nodes: the total resources of each node.

    Raises:
        ClusterError: they have not; it says what there is.
    """
    has = devices_of_kinds(bundle, nodes)
    for kind, wanted in Counter(kinds).items():
        if has.get(kind, 0) < wanted:
            there = ", ".join(f"{count} {name or 'without a type'}" for name, count in has.items())
            raise ClusterError(
                "plan",
                f"is for {wanted} devices of accelerator type {kind}, and the cluster has: {there or 'none'}",
                "plan for this cluster: raypipe profile JOB.yaml -o PROFILE.json, then raypipe autoconfigure "
                "JOB.yaml --profile PROFILE.json; nodes name their kind with ray start --resources "
                f"'{{\"{resource_of(kind)}\": 1}}' where Ray does not find it",
            )


def located_bundles(groups: Iterable[PlacementGroup], gpus: float, kinds: Sequence[str]) -> list[Bundle]:
    """Locate the bundles of reserved placement groups and return them in the planner's order.

    Args:
        groups: the placement groups, all of whose bundles are reserved; bundles are numbered from the first on.
        gpus: number of GPUs of each bundle. With GPUs, a task in each bundle reports their ids.
        kinds: the kind of device that each bundle asks for; empty: any.
    """
    places = []
    for group in groups:
        nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        places += [(group, index, nodes[index]) for index in sorted(nodes)]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    bundles = [Bundle(number, node, addresses.get(node, "")) for number, (_, _, node) in enumerate(places)]
    if gpus and len({bundle.node for bundle in bundles}) < len(bundles):
        result = ray.get([_ask_gpus(group, index, gpus) for group, index, _ in places], timeout=PROBE_S)
        bundles = [bundle._replace(gpus=tuple(ids)) for bundle, ids in zip(bundles, result, strict=True)]
    return in_planners_order(bundles, kinds)


def _ask_gpus(group: PlacementGroup, index: int, gpus: float) -> ray.ObjectRef:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    ask = ray.remote(ray.get_gpu_ids).options(num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy)
    return ask.remote()


def _address_key(address: str) -> tuple[int, int, str]:
    try:
        at = ip_address(address.strip("[]"))
    except ValueError:  # a host name, or no address
        return 0, 0, address
    return at.version, int(at), ""


def _gpu_key(bundle: Bundle) -> list[tuple[int, str]]:
    """GPU ids are numbers or UUIDs; Ray may report numbers as text."""
    return sorted((int(gpu), "") if str(gpu).isdecimal() else (-1, str(gpu)) for gpu in bundle.gpus)
