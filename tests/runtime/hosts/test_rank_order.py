"""Ranks are where the planner numbers devices: in plain lists, and on a Ray of several nodes."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from itertools import groupby

import pytest

from raypipe.cost.hosts import Hosts, Numbering, Placed, devices_on_hosts
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.plan.plan import MadeFor, Plan
from raypipe.runtime.hosts.rank_order import Bundle, by_number, host_by_host
from tests.ray_environment import without_ray


def test_hosts_follow_one_another_the_fullest_first() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        counts = [rng.randint(1, 6) for _ in range(rng.randint(1, 6))]
        bundles = [
            Bundle(0, f"node {host}", f"10.0.0.{200 - host * 19}", (gpu,))
            for host, count in enumerate(counts)
            for gpu in rng.sample(range(16), count)
        ]
        rng.shuffle(bundles)
        bundles = [bundle._replace(number=number) for number, bundle in enumerate(bundles)]
        ordered = host_by_host(bundles)
        assert sorted(ordered) == sorted(bundles)
        assert devices_on_hosts([b.node for b in ordered]) == tuple(sorted(counts, reverse=True))
        for _, own in groupby(ordered, lambda b: b.node):
            gpus = [b.gpus for b in own]
            assert gpus == sorted(gpus)
        shuffled = rng.sample(bundles, len(bundles))
        assert host_by_host(shuffled) == ordered  # whatever order Ray reports them in


def test_where_hosts_are_alike_it_is_what_the_planner_assumes() -> None:
    bundles = [Bundle(i, "ab"[i % 2], f"10.0.0.{i % 2}") for i in range(7)]  # as Ray may deal them out
    ordered = host_by_host(bundles)
    assert [b.node for b in ordered] == ["ab"[Hosts(4).of(rank)] for rank in range(7)]


def test_addresses_and_gpus_are_numbers_not_text() -> None:
    hosts = ["10.0.0.9", "10.0.0.10", "fd00::9", "fd00::10"]
    assert [b.address for b in host_by_host(Bundle(i, at, at) for i, at in enumerate(reversed(hosts)))] == hosts
    gpus = [("10",), ("9",), (2,)]
    ordered = host_by_host(Bundle(i, "node", "", ids) for i, ids in enumerate(gpus))
    assert [b.gpus for b in ordered] == [(2,), ("9",), ("10",)]
    named = host_by_host([Bundle(0, "node", "", ("GPU-b",)), Bundle(1, "node", "", ("GPU-a",))])
    assert [b.number for b in named] == [1, 0]


def plan_of_shape(width: int, copies: int, innermost: str, kinds: tuple[str, ...]) -> Plan:
    made = MadeFor(model={}, train={}, device="", decision="", hosts=(1,) * len(kinds), kinds=kinds)
    parallel = ParallelSpec(stages=width, replicas=copies, innermost=innermost)
    plan = Plan.of(parallel, tuple((s,) for s in range(width)), copies)
    return plan.model_copy(update={"made_for": made})


def test_copies_take_their_share_of_each_kind_as_the_costs_say() -> None:
    """Ranks and ``cost.stages.Placed`` number the same devices, for every shape."""
    for width, copies in itertools.product((1, 2, 3), (1, 2, 4)):
        several = Hosts(1, (1,) * width * copies, (0,) * width * copies)
        for hosts, innermost in (
            (several, "stages"),
            (several, "replicas"),
            (Hosts(2), "stages"),
            (Hosts(2), "replicas"),
        ):
            placed = Placed.of([tuple(range(width))], copies, hosts, innermost)
            numbers = [placed.device(copy, position) for copy in range(copies) for position in range(width)]
            plan = plan_of_shape(width, copies, innermost, ("a", "b") if hosts.kinds else ())
            assert plan.numbering().by_rank() == numbers
            assert sorted(numbers) == list(range(width * copies))
            by_rank = [f"{number}.{m}" for number in numbers for m in range(2)]
            every = [f"{n}.{m}" for n in range(width * copies) for m in range(2)]
            assert by_number(by_rank, plan.numbering(), 2) == every


CODE = """
import json, logging, sys
import ray
from ray.cluster_utils import Cluster
from raypipe.cost.hosts import Numbering
from raypipe.errors import ClusterError, SpecError
from raypipe.runtime.cluster.connect import connect
from raypipe.runtime.hosts.devices import DeviceRequest
from raypipe.runtime.hosts.rank_order import kind_of_node
from raypipe.runtime.hosts.reserve import reserve
from raypipe.runtime.worker.worker_group import start_worker_group
from ray.util import placement_group_table
from tests.ray_environment import node_settings

class Place:
    def __init__(self, rank, title):
        self.rank, self.title = rank, title

    def locate(self):
        return self.rank, self.title, ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()

def where(devices, request, together=1, kinds=(), numbering=None):
    titles = [f"device {d}" for d in range(devices)]
    place = reserve(devices, request, 60.0, together=together, kinds=kinds)
    group = start_worker_group(titles, place, Place, numbering=numbering)
    group.stop()
    return group.locations

small = {"object_store_memory": 100 << 20, **node_settings()}
cluster = Cluster()
for cpus, gpus, kind in ((2, 0, "old"), (5, 0, None), (3, 0, "new"), (2, 2, None), (4, 4, None)):
    marks = {} if kind is None else {"resources": {"accelerator_type:" + kind: 1}}
    cluster.add_node(num_cpus=cpus, num_gpus=gpus, **small, **marks)
ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
cpu, gpu = DeviceRequest(1.0, 0.0), DeviceRequest(0.5, 1.0)
found = {"all": where(16, cpu), "gpus": where(6, gpu), "gpu pairs": where(6, gpu, 2)}
found["copies inside"] = where(12, cpu, 2, numbering=Numbering(3, 2, "replicas"))
try:
    connect(6, together=3)  # six GPUs, four on one node and two on the other
except SpecError as error:
    found["refused"] = str(error)
numbering = Numbering(2, 2, "replicas")
found["kinds"] = where(4, cpu, kinds=("new", "new", "old", "old"), numbering=numbering)
found["pairs, old first"] = where(4, cpu, 2, ("old", "new"))
names = {node["NodeID"]: kind_of_node(node["Resources"]) for node in ray.nodes()}
for name in ("kinds", "pairs, old first"):
    found[name] = [names[at[2]] for at in found[name]]
try:
    reserve(3, cpu, 60.0, kinds=("old", "old", "old"))
except ClusterError as error:
    found["too few"] = str(error)

def by_node(held):
    counts = [part.group.bundle_count for part in held.parts]
    return [held.devices, counts, [len(placement_group_table(part.group)["bundles_to_node_id"]) for part in held.parts],
            len(held.nodes())]

held = reserve(6, cpu, 60.0, by_node=True)
steps = [by_node(held)]
first = {*placement_group_table(held.parts[0].group)["bundles_to_node_id"].values()}
group = start_worker_group(["a"] * 6, held.for_attempt(), Place)
kept = {at: actor for at, actor in zip(group.places.of_ranks(), group.actors)}
alive = ray.get([actor.locate.remote() for (place, _), actor in kept.items() if place.part == held.parts[1].name])
held = held.without(first)
steps.append(by_node(held))
again = ray.get([actor.locate.remote() for (place, _), actor in kept.items() if place.part == held.parts[0].name])
assert again == alive  # the same processes
held = held.with_more(4)
steps.append(by_node(held))
assert held.with_more(99) is None
held = held.at_most(3)
steps.append(by_node(held))
held.give_back()
found["by node"] = steps
print(json.dumps(found))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.runs
@pytest.mark.own_ray
def test_ranks_of_five_nodes_lie_host_by_host() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300, env=without_ray())
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    for name, counts in (("all", (5, 4, 3, 2, 2)), ("gpus", (4, 2)), ("gpu pairs", (4, 2))):
        assert devices_on_hosts([at[2] for at in result[name]]) == counts
    # Three stages of two copies, two ranks each: the copies of a stage follow one another host by host.
    inside = [at[2] for at in result["copies inside"]]
    counts = devices_on_hosts(by_number(inside, Numbering(3, 2, "replicas"), 2))
    assert counts == tuple(sorted(counts, reverse=True))
    assert len(counts) == len(set(inside)) < len(devices_on_hosts(inside))
    for name, devices in (("all", 16), ("gpus", 6), ("gpu pairs", 6)):
        assert [at[:2] for at in result[name]] == [[rank, f"device {rank}"] for rank in range(devices)]
        nodes = [at[2] for at in result[name]]
        assert len(devices_on_hosts(nodes)) == len(set(nodes))  # each host's ranks follow one another
    assert inside[::2] == inside[1::2]
    assert result["kinds"] == ["new", "old", "new", "old"]  # two copies, each with one of both kinds
    assert result["pairs, old first"] == ["old", "old", "new", "new"]
    # The largest node and one of the smallest; what is given back is a whole node's.
    assert result["by node"] == [[6, [5, 1], [5, 1], 2], [1, [1], [1], 1], [4, [1, 3], [1, 3], 2], [1, [1], [1], 1]]
    assert "is for 3 devices of accelerator type old" in result["too few"]
    assert "2 old" in result["too few"]
    for _, own in groupby(result["gpus"], lambda at: at[2]):
        gpus = [at[3] for at in own]
        assert gpus == sorted(gpus)
    both = [sorted(int(g) for at in result["gpu pairs"][d : d + 2] for g in at[3]) for d in (0, 2, 4)]
    assert both == [[0, 1], [2, 3], [0, 1]]
    assert "needs 2 groups of 3 GPUs, each on one node, and the nodes have room for 1" in result["refused"]
    assert "they have 4, 2, 0, 0, 0 GPUs" in result["refused"]
