"""Experts divided over copies: work, memory and all-to-all, by hand and by playing explicit messages."""

import random
from dataclasses import replace

import pytest

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.collectives import collective_seconds
from raypipe.cost.experts import (
    all_to_all_seconds,
    divided_experts,
    grouped_share,
    reached,
    with_divided_experts,
    with_exchange,
)
from raypipe.cost.hosts import Layout
from raypipe.cost.layer_work import ExpertsWork, LayerWork, linear_products
from raypipe.cost.memory import device_memory, parameter_bytes, stage_memory
from raypipe.cost.profile import ExpertsProfile, Profile
from raypipe.cost.sharded_stages import with_sharding
from raypipe.cost.stages import stage_costs
from raypipe.errors import SpecError
from raypipe.job import load_cluster
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule, Sharding
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate, shard
from raypipe.simulate.engine import simulate
from tests.cost.plain_layer import plain_layer

TOKENS, HIDDEN, INNER = 4096, 2048, 768
DENSE, OWN = 4_000_000, 128 * 3 * HIDDEN * INNER


def mixture(experts: int = 128, per_token: int = 8) -> LayerWork:
    """A layer like those of Qwen3-30B-A3B: dense parameters beside its experts, whose products alone take time."""
    rows = TOKENS * per_token
    up, down = (
        linear_products(rows, HIDDEN, 2 * INNER, groups=experts),
        linear_products(rows, INNER, HIDDEN, groups=experts),
    )
    layer = plain_layer("layer", flops=0.0, parameters=DENSE + OWN, kept_bytes=1e8, output_bytes=1e6)
    tasks = {}
    for name, products in zip(("forward", "input_grad", "weight_grad"), zip(up, down, strict=True), strict=True):
        one = replace(getattr(layer, name), products=products, flops=sum(p.flops for p in products), traffic=0.0)
        tasks[name] = replace(one, weights=2.0 * (DENSE + OWN), operands=0.0, overhead=0.0)
    own = ExpertsWork(experts, per_token, rows, 2.0 * HIDDEN, OWN, kept=0.5)
    return replace(layer, **tasks, experts=own)


@pytest.fixture(scope="module")
def cluster():
    return load_cluster("cluster/devices/h100.yaml").resized(64)


def profile_of(cluster, group: int, imbalance: float = 1.0, sizes=(1, 4)):
    works = [divided_experts(mixture(), group, imbalance)] * 4
    return analytic_profile(works, cluster, "bfloat16-true", sizes).model_copy(update={"experts": group})


@pytest.mark.parametrize("per_host", [1, 2, 8])
@pytest.mark.parametrize("hosts", [1, 2, 8])
def test_every_message_of_it(cluster, hosts: int, per_host: int) -> None:
    """Device by device: all messages at once, each over the link that joins the two, which all of a kind share."""
    h100 = profile_of(cluster, 1)
    size, busiest = 1e8, 0.0
    for device in range(hosts * per_host):
        inside = between = 0.0
        for peer in range(hosts * per_host):
            if peer != device:
                same = peer // per_host == device // per_host
                inside, between = inside + same * size, between + (not same) * size
        each = hosts * per_host
        rails = h100.between.shared(per_host / h100.host_links)
        times = [
            h100.inside.seconds(inside / each) if inside else 0.0,
            rails.seconds(between / each) if between else 0.0,
        ]
        busiest = max(busiest, *times)
    assert all_to_all_seconds(h100, size, Layout(hosts, per_host)) == pytest.approx(busiest, rel=1e-12)


@pytest.mark.parametrize(("experts", "per_token", "group"), [(8, 2, 4), (128, 8, 8), (64, 6, 64)])
def test_copies_that_a_token_reaches_by_counting(experts: int, per_token: int, group: int) -> None:
    draw, tokens = random.Random(0), 4000
    result = sum(len({e // (experts // group) for e in draw.sample(range(experts), per_token)}) for _ in range(tokens))
    assert reached(experts, per_token, group) == pytest.approx(result / tokens, rel=0.02)


def test_a_copy_holds_its_share_and_computes_as_many_rows_of_fewer_experts(cluster) -> None:
    whole, share = mixture(), divided_experts(mixture(), 8)
    assert share.parameters == DENSE + OWN // 8
    up, up_share = whole.forward.products[0], share.forward.products[0]
    assert (up_share.rows, up_share.groups, up.groups) == (up.rows, 16, 128)
    assert sum(t.flops for t in (share.forward, share.input_grad, share.weight_grad)) == pytest.approx(
        sum(t.flops for t in (whole.forward, whole.input_grad, whole.weight_grad))
    )
    assert share.weight_grad.flops == whole.weight_grad.flops  # which wait for W, as of undivided ones
    assert share.exchanged_bytes == pytest.approx(reached(128, 8, 8) * TOKENS * 2 * HIDDEN)
    assert divided_experts(whole, 1) is whole


def test_small_grouped_products_are_slower(cluster) -> None:
    """32 rows of each of 128 experts fill a quarter of a tile, and read all their weights; 256 rows of 16 do not."""
    works = [divided_experts(mixture(per_token=1), group) for group in (1, 8)]
    alone, divided = (analytic_profile([work], cluster, "bfloat16-true", [1]).layers[0].times[1] for work in works)
    assert divided.forward < 0.5 * alone.forward


def test_imbalance_costs_time_and_memory(cluster) -> None:
    even, skewed = (profile_of(cluster, 8, imbalance).layers[0] for imbalance in (1.0, 2.0))
    assert 1.7 * even.times[4].forward < skewed.times[4].forward < 2.2 * even.times[4].forward
    assert skewed.kept_bytes == pytest.approx(1.5 * even.kept_bytes)  # half of it is of routed rows
    assert skewed.exchanged_bytes == 2 * even.exchanged_bytes
    with pytest.raises(SpecError, match=r"parallel\.imbalance.*\n.*use 1 to 16"):
        divided_experts(mixture(), 8, 17)


def test_a_measured_profile_divides_as_a_computed_one(cluster) -> None:
    """But for times, which larger products make shorter where they are computed: those of measured rows grow alone."""
    whole, loads = profile_of(cluster, 1), (18.0, *[1.0] * 110, *[0.0] * 17)
    work = mixture()
    shares = [grouped_share(one) for one in (work.forward, work.input_grad, work.weight_grad)]
    assert shares == [1.0, 1.0, 1.0]
    own = ExpertsProfile(work=work.experts, forward=0.5, input_grad=0.25, weight_grad=0.75, loads=loads)
    layers = tuple(layer.model_copy(update={"experts": own}) for layer in whole.layers)
    measured = Profile.model_validate_json(whole.model_copy(update={"layers": layers}).model_dump_json())
    assert own.imbalance(8) == 18 / 16  # 15 experts without tokens share its copy
    assert own.imbalance(1) == 1.0
    for given in (None, 1.5):
        uneven = 1.125 if given is None else given
        made, computed = with_divided_experts(measured, 8, given), profile_of(cluster, 8, uneven)
        assert made.experts == 8
        for a, b, before in zip(made.layers, computed.layers, whole.layers, strict=True):
            apart = {"times", "matrices"}
            assert a.model_dump(exclude=apart) == pytest.approx(b.model_dump(exclude=apart))
            old, new = before.times[4], a.times[4]
            assert new.forward == pytest.approx(old.forward * (1 + (uneven - 1) * 0.5))
            assert new.joint == pytest.approx(new.input_grad + new.weight_grad)
            assert new.input_grad == pytest.approx(old.input_grad * (1 + (uneven - 1) * 0.25))
    with pytest.raises(SpecError, match=r"128 experts over 6 devices"):
        with_divided_experts(measured, 6)


def test_tokens_travel_in_forward_and_backward_of_a_stage(cluster) -> None:
    profile = profile_of(cluster, 8)
    cut, here = [[0, 1], [2, 3]], [[0, 1]]
    plain = stage_costs(profile.model_copy(update={"experts": 1}), cut, 4, here, copies=8)
    close = stage_costs(profile, cut, 4, here, copies=8, innermost="replicas")
    apart = stage_costs(profile, cut, 4, here, copies=8)  # four copies a host, so the eight are on two
    once = all_to_all_seconds(profile, 4 * profile.layers[0].exchanged_bytes, Layout(1, 8))
    assert close.dispatch == close.combine == pytest.approx((2 * once, 2 * once))
    for name in ("forward", "input_grad", "recompute"):
        longer = [a - b for a, b in zip(getattr(close, name), getattr(plain, name), strict=True)]
        assert longer == pytest.approx([4 * once, 4 * once])
    assert apart.dispatch[0] > 2 * close.dispatch[0]


def test_gradients_of_experts_are_summed_over_fewer_copies(cluster) -> None:
    """Of eight copies on one host, four hold the same half of the experts' gradients, and eight the dense ones."""
    profile, cut, here = profile_of(cluster, 2), [[0, 1, 2, 3]], [[0]]
    result = stage_costs(profile, cut, 1, here, copies=8).all_reduce[0]
    link = profile.inside

    def ring(size: float, group: int) -> float:
        return 2 * (group - 1) * (link.alpha_s + size / group * link.beta_s_per_byte)

    assert result == pytest.approx(ring(4 * 2 * DENSE, 8) + ring(4 * 2 * OWN / 2, 4), rel=0.01)


@pytest.mark.parametrize("innermost", ["stages", "replicas"])
@pytest.mark.parametrize(("group", "again"), [(16, 8), (8, 4)])
def test_copies_with_the_same_experts_divide_these_again(cluster, group: int, again: int, innermost) -> None:
    """Sixteen copies over two hosts, halves of the experts: one gather over the group, one over each second copy."""
    profile, each, cut = profile_of(cluster, 2), parameter_bytes("bfloat16-true"), [[0, 1, 2, 3]]
    shares = stage_memory(profile, cut[0], 1, each, split=False).divided(3, group, again)
    values = 4 * (DENSE / group + OWN / 2 / again)
    assert (shares.weights, shares.gradients) == pytest.approx((2 * values, 2 * values))
    assert shares.optimizer == pytest.approx(12 * values)
    sharding = Sharding(levels=(3,), group=group)
    costs = stage_costs(profile, cut, 1, [[0]], copies=16, innermost=innermost)
    sharded = with_sharding(costs, profile, cut, [[0]], sharding, 16, innermost)
    assert sharded.update[0] == pytest.approx(profile.update_s_per_parameter * values)
    hosts = 2 if group == 16 else 1
    dense, experts = (
        collective_seconds(profile, "all_gather", 2.0 * size, Layout(hosts, members // hosts), shared)
        for size, members, shared in ((4 * DENSE, group, 1), (4 * OWN / 2, again, 2))
    )
    assert sharded.gather[0] == pytest.approx(dense + experts)
    alone = device_memory(profile, cut, sharded_schedule(group), 1)[0]
    model = stage_memory(profile, cut[0], 1, each, split=False)
    assert alone.optimizer == pytest.approx(model.divided(1, group, again).optimizer)


def sharded_schedule(group: int) -> Schedule:
    one = replicate(generate("1f1b", Shape(devices=1, microbatches=2)), group)
    return add_updates(place_gradient_sync(shard(one, 1, gather="step", copies=group), "lazy"))


def test_groups_without_twins_divide_no_experts_twice(cluster) -> None:
    """With zero3 a copy has 1/8 of the dense parameters, and of the experts what it has without."""
    profile, each = profile_of(cluster, 8), parameter_bytes("bfloat16-true")
    shares = stage_memory(profile, [0, 1, 2, 3], 1, each, split=False).divided(3, 8)
    values = 4 * (DENSE / 8 + OWN / 8)
    assert shares.weights == pytest.approx(2 * values)
    assert shares.gradients == pytest.approx(2 * values)
    assert shares.optimizer == pytest.approx(12 * values)
    costs = stage_costs(profile, [[0, 1, 2, 3]], 1, [[0]], copies=8)
    sharded = with_sharding(costs, profile, [[0, 1, 2, 3]], [[0]], Sharding(levels=(3,), group=8), 8)
    assert sharded.update[0] == pytest.approx(profile.update_s_per_parameter * values)


def test_pairs_hide_what_the_table_says() -> None:
    schedule = generate("dualpipev", Shape(devices=4, microbatches=32))
    plain = CostTable.even(schedule.stages)
    times = [simulate(schedule, with_exchange(plain, [0.2] * 8, share)).makespan for share in (0, 0.5, 1)]
    assert times[0] > times[1] > times[2] > simulate(schedule, plain).makespan
    assert with_exchange(plain, [0, 0.4] * 4, 1.0).forward[:2] == (1.0, 1.8)


def test_what_does_not_divide_is_refused_with_the_nearest_number() -> None:
    with pytest.raises(SpecError, match="use 4") as caught:
        divided_experts(mixture(), 5)
    assert caught.value.where == "parallel.experts"
