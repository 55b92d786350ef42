"""Whether the Ray cluster may grow: then what it lacks now is worth waiting for.

Ray has no public call for it. What each of its two autoscalers publishes for ``ray status`` tells it: a cluster that
nobody resizes has a monitor as well, but that one knows no node types and names each node by its own id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import ray

STATUS = b"__autoscaling_status"
"""Where the monitor of autoscaler v1 publishes its report."""
NODE_GROUP = "ray.io/node-group"
"""Label of nodes that an autoscaler or KubeRay has started."""
_BY_ID = re.compile(r"node_[0-9a-f]+")


def autoscales() -> bool:
    """Whether an autoscaler adds nodes to the cluster that this process is connected to."""
    from ray.experimental.internal_kv import _internal_kv_get

    published = _internal_kv_get(STATUS)
    if published:
        return knows_node_types(json.loads(published))
    grouped = any(node.get("Labels", {}).get(NODE_GROUP) for node in ray.nodes() if node["Alive"])
    return grouped and _second_version_runs()


def knows_node_types(status: Mapping[str, Any]) -> bool:
    """Whether the report of a v1 monitor is of a cluster with node types, of which more nodes can be started."""
    report = status.get("autoscaler_report") or {}
    types = {*(report.get("node_type_mapping") or {}).values(), *(report.get("active_nodes") or ())}
    return any(_BY_ID.fullmatch(name) is None for name in types) or bool(report.get("pending_launches"))


def _second_version_runs() -> bool:
    """Whether an autoscaler v2 has reported its state."""
    from ray.autoscaler.v2.sdk import get_cluster_status

    return bool(get_cluster_status(ray.get_runtime_context().gcs_address).stats.autoscaler_version)
