"""Costs of sharded stages on the made-up profile: two devices a host, 4 bytes a value, links 1 + n/100 and 5 + n/10."""

import pytest

from raypipe.cost.collectives import collective_seconds
from raypipe.cost.hosts import Hosts, Layout
from raypipe.cost.sharded_stages import with_sharding
from raypipe.cost.stages import stage_costs, with_reduce_dtype
from raypipe.schedule.ir import Sharding
from raypipe.schedule.sharding import shard_members

CUT = [(0, 1, 2), (3, 4, 5)]


def costs(profile, copies, levels, group=None, placement=((0, 1),)):
    plain = stage_costs(profile, CUT, 2, placement, copies=copies)
    sharding = Sharding(levels=levels, group=group)
    return plain, with_sharding(plain, profile, CUT, placement, sharding, copies)


def test_two_copies_on_two_hosts(profile):
    """Stage 0 has 100 values of 4 bytes; a ring of two sends half of them once: 5 + 0.1 * 200, the link for itself.

    Both stages of a host send at the same time over its one link, so each has half of its bandwidth.
    """
    plain, result = costs(profile, 2, (3, 0))
    assert result.gather == pytest.approx((5 + 0.1 * 200 * 2, 0.0))
    assert result.reduce_scatter == result.gather
    assert result.all_reduce == (0.0, plain.all_reduce[1])
    assert result.update == pytest.approx((plain.update[0] - 0.1 * 100 / 2, plain.update[1]))
    assert result.forward == plain.forward


def test_shards_inside_a_host_are_replicated_between_hosts(profile):
    """One stage on one device, four copies on two hosts: pairs gather inside, halves are summed between the hosts."""
    layers = [tuple(range(6))]
    plain = stage_costs(profile, layers, 2, ((0,),), copies=4)
    result = with_sharding(plain, profile, layers, ((0,),), Sharding(levels=(3,), group=2), 4)
    size = (60 + 4 * 20 + 55 - 50) * 4
    assert result.gather == pytest.approx((1 + 0.01 * size / 2,))
    # Two copies of each half, on a link that both halves share: 2 messages of a quarter each.
    assert result.all_reduce == pytest.approx((2 * 5 + 2 * 0.1 * (size / 4) * 2,))
    whole = with_sharding(plain, profile, layers, ((0,),), Sharding(levels=(3,)), 4)
    assert whole.gather[0] > result.gather[0]
    assert whole.all_reduce == (0.0,)


def test_sums_in_half_the_bytes(profile):
    """Reduce-scatters and sums between groups move half of it, gathers what they did."""
    layers = [tuple(range(6))]
    narrow = with_reduce_dtype(profile, "bfloat16")
    both = [stage_costs(one, layers, 2, ((0,),), copies=4) for one in (profile, narrow)]
    assert both[1].all_reduce[0] < both[0].all_reduce[0]
    own, half = (
        with_sharding(plain, one, layers, ((0,),), Sharding(levels=(3,), group=2), 4)
        for plain, one in zip(both, (profile, narrow), strict=True)
    )
    size = (60 + 4 * 20 + 55 - 50) * 4
    assert half.gather == own.gather
    assert half.reduce_scatter == pytest.approx((1 + 0.01 * size / 4,))
    assert half.all_reduce == pytest.approx((2 * 5 + 2 * 0.1 * (size / 8) * 2,))


@pytest.mark.parametrize(("copies", "group", "hosts"), [
    (6, 3, Hosts(4)), (6, 2, Hosts(3)), (12, 3, Hosts(4)), (8, 2, Hosts(4)), (6, 3, Hosts(4, (4, 1, 1)))
])  # fmt: skip
def test_the_slowest_of_several_groups_counts(profile, copies, group, hosts) -> None:
    """A group's devices are those that the runtime would give it, however hosts divide them."""
    profile = profile.model_copy(update={
        "devices": copies, "devices_per_host": hosts.per_host, "hosts": hosts.counts,
    })  # fmt: skip
    layers = [tuple(range(6))]
    plain = stage_costs(profile, layers, 2, ((0,),), copies=copies)
    sharding = Sharding(levels=(3,), group=group)
    result = with_sharding(plain, profile, layers, ((0,),), sharding, copies)
    members = shard_members(Sharding(levels=(3,), group=group, copies=copies), tuple((d,) for d in range(copies)))
    layouts = {Layout.of(member.group, hosts) for member in members.values()}
    size = (60 + 4 * 20 + 55 - 50) * 4
    each = [
        collective_seconds(profile, "all_gather", size, layout, max(1, hosts.per_host // layout.per_host))
        for layout in layouts
    ]
    assert result.gather == pytest.approx((max(each),))
