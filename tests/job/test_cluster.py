"""Every way a cluster file can be wrong is one SpecError that says where, why and what to write."""

from pathlib import Path

import pytest
import yaml

from raypipe.errors import SpecError
from raypipe.job import load_cluster
from raypipe.job.cluster import cluster_file, cluster_from, moved_note

ROOT = Path(__file__).parents[2]

CLUSTER = {
    "name": "pair",
    "hosts": 2,
    "devices_per_host": 4,
    "device": {
        "name": "gpu", "memory_gib": 16, "peak_tflops": {"float32": 10, "bfloat16": 80}, "memory_gb_s": 900,
        "efficiency": 0.7,
    },
    "inside": {"latency_us": 5, "bandwidth_gb_s": 100},
    "between": {"latency_us": 10, "bandwidth_gb_s": 12},
}  # fmt: skip


def changed(path, value):
    """A deep copy with one key set, or taken out for the value None."""
    data = yaml.safe_load(yaml.safe_dump(CLUSTER))
    *parts, last = path.split(".")
    inner = data
    for part in parts:
        inner = inner[part]
    inner[last] = value
    if value is None:
        del inner[last]
    return data


def test_a_good_file(tmp_path):
    path = tmp_path / "pair.yaml"
    path.write_text(yaml.safe_dump(CLUSTER))
    cluster = load_cluster(path)
    assert (cluster.devices, cluster.host_links, cluster.device.usable) == (8, 1, 0.94)


WRONG = [  # key, value, key in `where`, words in the message
    ("between.bandwidth_gb_s", 0, "between.bandwidth_gb_s", "give a value greater than 0"),
    ("inside.bandwidth_gb_s", -3, "inside.bandwidth_gb_s", "is -3"),
    ("inside.latency_us", -1, "inside.latency_us", "greater than or equal to 0"),
    ("inside.bandwith_gb_s", 5, "inside.bandwith_gb_s", 'did you mean "bandwidth_gb_s"?'),
    ("device.memory", 5, "device.memory", 'did you mean "memory_g'),
    ("host", 5, "host", 'did you mean "hosts"?'),
    ("hosts", 0, "hosts", "greater than or equal to 1"),
    ("hosts", 1.5, "hosts", "give a whole number"),
    ("device.efficiency", 1.5, "device.efficiency", "less than or equal to 1"),
    ("device.peak_tflops", {"bfloat61": 3}, "device.peak_tflops", 'did you mean "bfloat16"?'),
    ("device.peak_tflops", {}, "device.peak_tflops", "give at least one"),
    ("device.peak_tflops", 10, "device.peak_tflops", "give keys and values"),
    ("device.peak_tflops.float32", 0, "device.peak_tflops.float32", "greater than 0"),
    ("device.memory_gb_s", None, "device.memory_gb_s", "missing"),
    ("between", None, "between", "cluster/devices/a100.yaml shows a whole cluster"),
    ("device", "a100", "device", "give keys and values"),
    ("device.memory_gb_s", float("inf"), "device.memory_gb_s", "finite"),
]


@pytest.mark.parametrize(("key", "value", "where", "words"), WRONG)
def test_a_wrong_value_is_one_clear_error(key, value, where, words):
    with pytest.raises(SpecError) as error:
        cluster_from(changed(key, value), "c.yaml")
    assert error.value.where == f"c.yaml: {where}"
    assert words in str(error.value)


def test_a_missing_file_names_its_neighbours(tmp_path):
    (tmp_path / "h100.yaml").write_text("")
    (tmp_path / "p100.yaml").write_text("")
    with pytest.raises(SpecError, match=r'did you mean "h100\.yaml"'):
        load_cluster(tmp_path / "h10.yaml")
    with pytest.raises(SpecError, match=r"known: h100\.yaml, p100\.yaml"):
        load_cluster(tmp_path / "zzzzzzzzzzzz")
    with pytest.raises(SpecError, match="give the path of a cluster file"):
        load_cluster(tmp_path / "nowhere" / "h100.yaml")


def test_no_mapping(tmp_path):
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(SpecError, match="holds a list instead of keys and values"):
        load_cluster(tmp_path / "list.yaml")


def test_links_that_nothing_uses_may_be_left_out():
    alone = changed("inside", None)
    alone["devices_per_host"] = 1
    assert cluster_from(alone).inside == cluster_from(alone).between
    one_host = changed("between", None)
    one_host["hosts"] = 1
    assert cluster_from(one_host).between == cluster_from(one_host).inside


def test_resized():
    cluster = cluster_from(CLUSTER)
    assert (cluster.resized(16).hosts, cluster.resized(16).devices) == (4, 16)
    assert (cluster.resized(3).hosts, cluster.resized(3).devices) == (1, 3)
    for wrong in (0, -1, 6, 13):
        with pytest.raises(SpecError, match="devices"):
            cluster.resized(wrong)
    with pytest.raises(SpecError, match="use 4 or 8"):
        cluster.resized(6)


@pytest.mark.parametrize("old", ["cluster/a100.yaml", "a100"])
def test_where_descriptions_used_to_be_and_their_names_still_lead_to_them(old, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert load_cluster(old) == load_cluster("cluster/devices/a100.yaml")
    note = moved_note(Path(old))
    assert (note is not None) == (old != "a100")
    assert note is None or "cluster/devices/a100.yaml" in note
    assert moved_note(Path("cluster/devices/a100.yaml")) is None


def test_a_name_that_is_nearly_a_description_s():
    with pytest.raises(SpecError, match=r'cluster: "h1000" is unknown\n  fix: did you mean "h100"\?$'):
        load_cluster("h1000")


def test_a_file_in_the_old_place_is_taken_as_it_is(tmp_path):
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "a100.yaml").write_text("name: other")
    (tmp_path / "a100.yaml").write_text("name: mine")
    assert cluster_file(tmp_path / "a100.yaml") == tmp_path / "a100.yaml"
