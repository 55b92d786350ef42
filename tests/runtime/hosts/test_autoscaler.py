"""A cluster that may grow is told from one that nobody resizes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import ray
from ray.experimental import internal_kv

from raypipe.compat import ray_private
from raypipe.errors import SpecError
from raypipe.runtime.cluster import connect as cluster
from raypipe.runtime.hosts import reserve
from raypipe.runtime.hosts.devices import DeviceRequest, request_devices

BY_ID = "node_902f9706ec739e1f143b0c9c8f2f29dcfea95b0ef391054a9d88e25a"


@pytest.mark.parametrize(
    ("report", "grows"),
    [
        ({"active_nodes": {BY_ID: 1}, "node_type_mapping": {"902f": BY_ID}, "pending_launches": {}}, False),
        ({"active_nodes": {}, "node_type_mapping": {"ffff": "ray.head.default"}, "pending_launches": {}}, True),
        ({"active_nodes": {"worker": 2}, "node_type_mapping": None}, True),
        ({"active_nodes": {BY_ID: 1}, "pending_launches": {"worker": 1}}, True),
        (None, False),
    ],
)
def test_first_version(report: dict[str, object] | None, grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    published = json.dumps({"autoscaler_report": report}).encode()
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda _key: published)
    assert reserve.autoscales() is grows


@pytest.mark.parametrize(("label", "version", "grows"), [("workers", 3, True), ("workers", 0, False), ("", 3, False)])
def test_second_version(label: str, version: int, grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda _key: None)
    labels = {"ray.io/node-group": label} if label else {}
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Labels": labels}])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=""))
    monkeypatch.setattr(ray_private, "second_autoscaler_runs", lambda _: version > 0)
    assert reserve.autoscales() is grows


def test_only_a_cluster_that_grows_is_asked_for_more_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError):
        request_devices(4, {"CPU": 2.0})
    assert request_devices(4, {"CPU": 2.0}, grows=True) == DeviceRequest(1.0, 0.0)
    monkeypatch.setattr(cluster, "_join", lambda *_: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr(cluster, "autoscales", lambda: True)
    assert cluster.connect(4) == DeviceRequest(1.0, 0.0)
    monkeypatch.setattr(cluster, "autoscales", lambda: False)
    with pytest.raises(SpecError, match="asks for 4 devices"):
        cluster.connect(4)


@pytest.mark.runs
def test_rays_own_local_cluster_does_not_grow(local_ray) -> None:
    assert reserve.autoscales() is False
