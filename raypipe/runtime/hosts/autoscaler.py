"""Nodes that come and go: whether an autoscaler may add some, which ones will go, and what is free on the others.

Ray has no public call for the first, so it is read from what its autoscalers (v1 and v2) publish for ``ray status``. A
cluster without an autoscaler has a v1 monitor too, but that one knows no node types and names each node by its id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources

from raypipe.compat import ray_private
from raypipe.runtime.hosts.devices import DeviceRequest

NODE_GROUP = "ray.io/node-group"
"""Label of nodes that an autoscaler or KubeRay has started."""
_BY_ID = re.compile(r"node_[0-9a-f]+")


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
