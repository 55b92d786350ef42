"""Give ranks to reserved bundles: hosts one after another, and the GPUs of a host in their order.

The planner numbers devices host by host, but Ray places bundles in an order of its own. So a worker group's bundles
are located first, and ranks are given in the order that ``in_rank_order`` makes. A bundle lies on one node, and each
holds one tensor-parallel group: these never straddle nodes. Which of a bundle's GPUs its processes get is up to Ray.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from ipaddress import ip_address
from typing import NamedTuple

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

GpuId = int | str
PROBE_S = 120.0
"""Time that the tasks that ask for GPU ids have to start."""


class Bundle(NamedTuple):
    """A bundle of a placement group, and where it is."""

    number: int
    """Its index in the placement group."""
    node: str
    """Ray's id of its node."""
    address: str = ""
    """The node's IP address."""
    gpus: tuple[GpuId, ...] = ()
    """Ids of its GPUs on that node."""


def in_rank_order(bundles: Iterable[Bundle]) -> list[Bundle]:
    """Sort bundles as the planner numbers devices.

    The node with most bundles comes first, so that all but the last have equally many where hosts are alike; among
    equals the one with the lower address. Inside a node, bundles are in the order of their GPUs.
    """
    bundles = list(bundles)
    on_node = Counter(bundle.node for bundle in bundles)

    def key(bundle: Bundle) -> tuple[object, ...]:
        return (-on_node[bundle.node], *_address_key(bundle.address), bundle.node, _gpu_key(bundle), bundle.number)

    return sorted(bundles, key=key)


def bundles_in_rank_order(group: PlacementGroup, gpus: float) -> list[Bundle]:
    """Locate the bundles of a reserved placement group and return them in the order in which they get their ranks.

    Args:
        group: the placement group, all of whose bundles are reserved.
        gpus: number of GPUs of each bundle. With GPUs, a task in each bundle reports their ids.
    """
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    bundles = [Bundle(number, node, addresses.get(node, "")) for number, node in nodes.items()]
    if gpus and len(set(nodes.values())) < len(bundles):
        found = ray.get([_ask_gpus(group, bundle.number, gpus) for bundle in bundles], timeout=PROBE_S)
        bundles = [bundle._replace(gpus=tuple(ids)) for bundle, ids in zip(bundles, found, strict=True)]
    return in_rank_order(bundles)


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
