"""Nodes that come and go: whether an autoscaler may add some, which ones will go, and what is free on the others.

Ray has no public call for the first, so it is read from what its autoscalers (v1 and v2) publish for ``ray status``. A
cluster without an autoscaler has a v1 monitor too, but that one knows no node types and names each node by its id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray._private.state import available_resources_per_node, state
from ray.autoscaler.sdk import request_resources

from raypipe.runtime.hosts.devices import DeviceRequest

STATUS = b"__autoscaling_status"
"""Key under which the monitor of autoscaler v1 publishes its report."""
NODE_GROUP = "ray.io/node-group"
"""Label of nodes that an autoscaler or KubeRay has started."""
_BY_ID = re.compile(r"node_[0-9a-f]+")


def autoscales() -> bool:
    """Return whether an autoscaler adds nodes to the cluster that this process is connected to."""
    from ray.experimental.internal_kv import _internal_kv_get

    published = _internal_kv_get(STATUS)
    if published:
        return knows_node_types(json.loads(published))
    grouped = any(node.get("Labels", {}).get(NODE_GROUP) for node in ray.nodes() if node["Alive"])
    return grouped and _second_version_runs()


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


def drained_nodes() -> set[str]:
    """Return the ids of nodes that will go soon: a cloud takes them back, or somebody called ``ray drain-node``.

    Ray starts nothing on them any more. Its own training and serving libraries ask for them in the same way.
    """
    return set(state.get_draining_nodes())


def free_workers(request: DeviceRequest) -> int:
    """Return how many more workers there is room for now, on nodes that stay."""
    kind = "GPU" if request.gpus else "CPU"
    return sum(free_bundles({kind: request.bundle()[kind]}).values())


def free_bundles(bundle: Mapping[str, float]) -> dict[str, int]:
    """Return how many of a bundle there is room for now on each node that stays, by Ray's id of the node."""
    stay = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - drained_nodes()
    return {
        node: min(int(has.get(kind, 0.0) / each + 1e-6) for kind, each in bundle.items() if each)
        for node, has in available_resources_per_node().items()
        if node in stay
    }


def knows_node_types(status: Mapping[str, Any]) -> bool:
    """Return whether a v1 monitor's report names node types, of which an autoscaler can start more nodes."""
    report = status.get("autoscaler_report") or {}
    types = {*(report.get("node_type_mapping") or {}).values(), *(report.get("active_nodes") or ())}
    return any(_BY_ID.fullmatch(name) is None for name in types) or bool(report.get("pending_launches"))


def _second_version_runs() -> bool:
    """Return whether an autoscaler v2 has reported its state."""
    from ray.autoscaler.v2.sdk import get_cluster_status

    return bool(get_cluster_status(ray.get_runtime_context().gcs_address).stats.autoscaler_version)
