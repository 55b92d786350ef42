"""All-to-all over NVLink and rails, uneven loads, and the cost table that they make."""

import random

import pytest

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.collectives import Layout
from raypipe.cost.experts import Routing, all_to_all_seconds, with_exchange
from raypipe.errors import SpecError
from raypipe.job import load_cluster
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.simulate.engine import simulate
from tests.cost.plain_layer import plain_layer

QWEN3_30B = Routing(experts=128, per_token=8, dispatch_bytes=2 * 2048, combine_bytes=2 * 2048)


@pytest.fixture(scope="module")
def h100():
    layer = plain_layer("layer", flops=1e9, parameters=1000, kept_bytes=1e6, output_bytes=1e6)
    cluster = load_cluster("cluster/devices/h100.yaml").resized(64)
    return analytic_profile([layer], cluster, "bfloat16-true", [1])


@pytest.mark.parametrize("per_host", [1, 2, 8])
@pytest.mark.parametrize("hosts", [1, 2, 8])
def test_every_message_of_it(h100, hosts: int, per_host: int) -> None:
    """Device by device: one peer after another, each message over the link that joins the two."""
    size, busiest = 1e8, 0.0
    for device in range(hosts * per_host):
        inside = between = 0.0
        for peer in range(hosts * per_host):
            if peer == device:
                continue
            each = size / (hosts * per_host)
            if peer // per_host == device // per_host:
                inside += h100.inside.seconds(each)
            else:
                between += h100.between.shared(per_host / h100.host_links).seconds(each)
        busiest = max(busiest, inside, between)
    assert all_to_all_seconds(h100, size, Layout(hosts, per_host)) == pytest.approx(busiest, rel=1e-12)


def test_rails_cost_more_than_nvlink_and_imbalance_as_much_as_it_says(h100) -> None:
    inside = QWEN3_30B.seconds(h100, 16384, Layout(1, 8))
    across = QWEN3_30B.seconds(h100, 16384, Layout(2, 8))
    assert across[0] > 3 * inside[0]
    skewed = Routing(experts=128, per_token=8, dispatch_bytes=4096, combine_bytes=4096, imbalance=1.5)
    latency = 7 * h100.inside.alpha_s
    assert skewed.seconds(h100, 16384, Layout(1, 8))[0] == pytest.approx(1.5 * (inside[0] - latency) + latency)
    assert QWEN3_30B.seconds(h100, 16384, Layout(1, 1)) == (0.0, 0.0)


def test_rows_of_the_busiest_device_by_counting() -> None:
    draw, group, tokens = random.Random(0), 4, 4000
    load = [0] * 8
    for _ in range(group * tokens):
        for expert in draw.sample(range(8), 2):
            load[expert] += 1
    device = [sum(load[2 * d : 2 * d + 2]) for d in range(group)]
    imbalance = max(device) * group / sum(device)
    routing = Routing(experts=8, per_token=2, dispatch_bytes=1, combine_bytes=1, imbalance=imbalance)
    assert routing.rows(tokens, group) == pytest.approx(max(device))


def test_pairs_hide_what_the_table_says() -> None:
    schedule = generate("dualpipev", Shape(devices=4, microbatches=32))
    plain = CostTable.even(schedule.stages)
    times = [simulate(schedule, with_exchange(plain, [1] * 8, (0.2, 0.2), share)).makespan for share in (0, 0.5, 1)]
    assert times[0] > times[1] > times[2] > simulate(schedule, plain).makespan
    assert with_exchange(plain, [0, 2] * 4, (0.1, 0.3), 1.0).forward[:2] == (1.0, 1.8)


def test_what_does_not_divide_is_refused_with_the_nearest_number(h100) -> None:
    with pytest.raises(SpecError, match="use 4") as caught:
        Routing(experts=128, per_token=8, dispatch_bytes=1, combine_bytes=1).check(5)
    assert caught.value.where == "parallel.experts"
    with pytest.raises(SpecError, match="all tokens on one expert"):
        Routing(experts=8, per_token=2, dispatch_bytes=1, combine_bytes=1, imbalance=5)
    with pytest.raises(SpecError, match="choose from 1"):
        Routing(experts=8, per_token=9, dispatch_bytes=1, combine_bytes=1)
