"""The clusters that we describe are what Ray and KubeRay read, and are closed to strangers."""

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
RAY_UP = sorted((ROOT / "cluster" / "ray-up").glob("*.yaml"))
KUBERAY = sorted((ROOT / "cluster" / "kuberay").glob("*.yaml"))
HERE = Path(__file__).parent
CRD = json.loads((HERE / "kuberay-1.7.0.json").read_text(encoding="utf-8"))
POLICY = yaml.safe_load((HERE / "network_policy_schema.yaml").read_text(encoding="utf-8"))


def strict(schema):
    """Refuse fields that a custom resource definition does not have, as ``kubectl apply`` does."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields")
    return {key: strict(value) for key, value in schema.items()} | ({"additionalProperties": False} if closed else {})


def validate(resource):
    """Check a resource by the schema of its kind: KubeRay's own, or that of a NetworkPolicy.

    Raises:
        jsonschema.ValidationError: the API server would refuse it.
    """
    if resource["kind"] == "NetworkPolicy":
        jsonschema.Draft202012Validator(POLICY).validate(resource)
    else:
        assert resource["apiVersion"] == "ray.io/v1"
        schema = {"$defs": strict(CRD["$defs"]), **strict(CRD["kinds"][resource["kind"]])}
        jsonschema.Draft202012Validator(schema).validate(resource)


def rays_schema():
    import importlib.util

    ray = importlib.util.find_spec("ray").origin
    return json.loads((Path(ray).parent / "autoscaler" / "ray-schema.json").read_text(encoding="utf-8"))


def documents(path):
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", RAY_UP, ids=lambda p: p.stem)
def test_ray_up_reads_it(path):
    from ray.autoscaler._private.util import prepare_config, validate_config

    (cluster,) = documents(path)
    jsonschema.validate(cluster, rays_schema())
    filled = prepare_config(cluster)  # what `ray up` does before it starts anything
    validate_config(filled)
    least = {node.get("min_workers", 0) for node in filled["available_node_types"].values()}
    assert least == ({2} if path.stem == "local" else {0})
    for node in cluster.get("available_node_types", {}).values():
        assert node["node_config"]
    starts = [c for c in cluster["head_start_ray_commands"] if "ray start" in c]
    assert all("--dashboard-host=127.0.0.1" in c for c in starts)
    assert any("RAY_AUTH_MODE=token" in c for c in cluster["setup_commands"])


def test_ray_up_would_not_read_a_wrong_one():
    (cluster,) = documents(RAY_UP[0])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**cluster, "worker_count": 3}, rays_schema())


@pytest.mark.parametrize("path", KUBERAY, ids=lambda p: p.stem)
def test_kuberay_reads_it(path):
    ray, policy = documents(path)
    for one in (ray, policy):
        validate(one)
    spec = ray["spec"].get("rayClusterSpec", ray["spec"])
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert policy["spec"]["podSelector"]["matchLabels"]
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        mounted = {m["name"] for c in pod["containers"] for m in c["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    if "entrypoint" in ray["spec"]:
        assert isinstance(yaml.safe_load(ray["spec"]["runtimeEnvYAML"]), dict)


WRONG = [
    (("spec", "authOptions", "mode"), "tokens"),
    (("spec", "autoscalerOptions", "upscalingMode"), "Fast"),
    (("spec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
    (("spec", "workerGroupSpecs", 0, "maxReplica"), 4),
    (("spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "resources", "limits", "memory"), "200 GB"),
    (("spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "ports"), [{"name": "gcs"}]),
]


@pytest.mark.parametrize(("keys", "value"), WRONG, ids=lambda x: str(x[-1]) if isinstance(x, tuple) else "")
def test_the_schema_refuses_what_kuberay_would(keys, value):
    ray = copy.deepcopy(documents(ROOT / "cluster" / "kuberay" / "raycluster.yaml")[0])
    inner = ray
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(ray)


def test_manifests_name_an_installed_kind_of_ray():
    for path in KUBERAY:
        assert re.search(r'rayVersion: "\d+\.\d+\.\d+"', path.read_text(encoding="utf-8"))
