"""Stage costs by hand: sums over layers, sizes between the profiled ones, links by host, gradient sums, updates."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest

from raypipe.cost.hosts import Hosts, Layout, Placed
from raypipe.cost.memory import device_memory
from raypipe.cost.profile import LayerProfile, TaskTimes
from raypipe.cost.sharded_stages import with_sharding
from raypipe.cost.sizes import stage_times, times_at, times_of_stages
from raypipe.cost.stages import costs_of, parameters, stage_costs, with_cast_messages, with_mean_rows
from raypipe.errors import SpecError
from raypipe.job.train_spec import TrainSpec
from raypipe.schedule import Shape, generate
from raypipe.schedule.ir import Sharding
from raypipe.schedule.passes import place_gradient_sync, replicate
from raypipe.schedule.shape import Innermost
from raypipe.simulate.engine import simulate

CUT = [(0, 1), (2,), (3,), (4, 5)]
LINE = [(0, 1, 2, 3)]


def test_tasks_are_sums_over_layers(profile):
    costs = stage_costs(profile, CUT, 2, LINE)
    assert costs.forward == (2 + 5, 5, 5, 2 + 6)
    assert costs.by_kind("BW") == (2 + 10, 9, 9, 2 + 12)  # joint: one pass over both gradients
    assert costs.recompute == costs.forward
    assert stage_costs(profile, CUT, 2, LINE, recomputed={1, 3}).recompute == (5, 0, 5, 0)
    apart = stage_costs(profile, CUT, 2, LINE, split=True)
    assert apart.input_grad == (2 + 7.5, 7, 7, 2 + 9)
    assert apart.weight_grad == (2 + 2.5, 3, 3, 2 + 3)
    assert sum(apart.by_kind("BW")) > sum(costs.by_kind("BW"))


def test_every_task_has_its_overhead(profile):
    costs = stage_costs(profile.model_copy(update={"task_overhead_s": 0.25}), CUT, 2, LINE)
    assert costs.forward[1] == 5.25
    assert costs.by_kind("BW")[1] == pytest.approx(9.25)


@pytest.mark.parametrize(("copies", "share"), [(1, 0.7), (2, 0.8), (3, 0.9), (4, 1.0), (8, 1.0)])
def test_a_device_whose_neighbours_are_idle_is_faster(profile, copies, share):
    """Hosts of four: one alone takes 0.7 of what the profile says, all four just that, two and three lie between."""
    sharing = profile.model_copy(update={"alone": 0.7, "devices_per_host": 4, "task_overhead_s": 0.25})
    costs = stage_costs(sharing, [tuple(range(6))], 2, [(0,)], copies=copies)
    assert costs.forward == pytest.approx((share * (2 + 4 * 5 + 3) + 0.25,))
    assert costs.recompute == pytest.approx(costs.forward)
    assert costs.by_kind("BW") == pytest.approx((share * (3 + 4 * 9 + 5) + 0.25,))
    assert stage_costs(sharing, CUT, 2, LINE).forward == (2.25 + 5, 5.25, 5.25, 5.25 + 3)


@pytest.mark.parametrize(("samples", "forward"), [(1, 3), (2, 5), (3, 7), (4, 9), (8, 17), (0.5, 3)])
def test_sizes_that_were_not_profiled(profile, samples, forward):
    """On the line between neighbours and beyond the largest; below the smallest, no less than it."""
    assert times_at(profile.layers[1], samples).forward == forward


def test_one_profiled_size_scales(profile):
    block = profile.layers[1]
    only = block.model_copy(update={"times": {2: block.times[2]}})
    assert times_at(only, 4).forward == 10
    assert times_at(only, 1).forward == 5


def test_a_noisy_last_pair_does_not_lead_to_negative_times(profile):
    block = profile.layers[1]
    falling = block.model_copy(update={"times": {1: block.times[4], 2: block.times[1]}})
    assert times_at(falling, 100).forward == block.times[1].forward


def test_halves_of_micro_batches_are_less_efficient(profile):
    """Two halves of 1 sample take 2 * 3, one task of 2 takes 5; the table speaks of full micro-batches."""
    halves = stage_costs(profile, CUT, 2, LINE, size=0.5)
    assert halves.forward[1] == 6
    schedule = generate("chimera", Shape(devices=4, microbatches=8, concat="halving"))
    assert costs_of(profile, CUT, 2, schedule).forward[1] == 6


def test_pairs_run_as_one_forward(profile):
    """One task of 4 samples takes 9, two of 2 take 10; backwards and recomputations stay single."""
    doubled = costs_of(profile, CUT, 2, generate("chimera", Shape(devices=4, microbatches=8, concat="doubling")))
    assert (doubled.forward[1], doubled.recompute[1], doubled.by_kind("BW")[1]) == (4.5, 5, 9)
    # Halves of a micro-batch, whose activations are kept, run one by one.
    halved = costs_of(profile, CUT, 4, generate("chimera", Shape(devices=4, microbatches=8, concat="halving")))
    assert halved.forward[1] == 2 * 5


def test_packed_rows_are_as_long_as_they_are_on_average(profile):
    """Rows of 100 tokens, 10 of which have 550 together."""
    train = TrainSpec(steps=1, batch=10, tokens_per_step=550, microbatch_tokens=100)
    mean, whole = with_mean_rows(profile, train), profile
    assert stage_costs(mean, CUT, 2, LINE).forward == pytest.approx(
        [0.55 * t for t in stage_costs(whole, CUT, 2, LINE).forward]
    )
    # 11 bytes a message of two samples, beside ``test_links_by_host``.
    assert stage_costs(mean, CUT, 2, LINE).comm == pytest.approx((1.11, 5 + 0.55 * 2, 1.11, 1.11))
    assert [layer.kept_bytes for layer in mean.layers] == [layer.kept_bytes for layer in whole.layers]
    assert with_mean_rows(profile, TrainSpec(steps=1, batch=10)) is profile


def test_links_by_host(profile):
    """20 bytes a message of two samples: 1 + 0.2 inside a host, 5 + 2 between hosts."""
    assert stage_costs(profile, CUT, 2, LINE).comm == (1.2, 7, 1.2, 1.2)  # the last one has no use
    assert stage_costs(profile, CUT, 2, [(0, 1, 2, 3), (3, 2, 1, 0)]).comm == (1.2, 7, 1.2, 1.2)
    v = stage_costs(profile, CUT, 2, [(0, 1, 1, 0)])
    assert v.links[:3] == (1.2, 0, 1.2)
    assert stage_costs(profile, [range(6)], 2, [(0,)]).comm == 0


def test_narrow_messages(profile):
    """Of 20 bytes, 10 in bfloat16; where 8 of them are integers, 8 and half of 12. What is kept stays as wide."""
    assert with_cast_messages(profile, None) is profile
    half = with_cast_messages(profile, "bfloat16")
    assert stage_costs(half, CUT, 2, LINE).comm == (1.1, 6, 1.1, 1.1)
    assert [layer.kept_bytes for layer in half.layers] == [layer.kept_bytes for layer in profile.layers]
    schedule = generate("1f1b", Shape(devices=4, microbatches=8))
    for narrow, wide in zip(*(device_memory(p, CUT, schedule, 2) for p in (half, profile)), strict=True):
        assert narrow.messages < wide.messages
        assert replace(narrow, messages=wide.messages) == wide
    mixed = tuple(layer.model_copy(update={"output_floats": layer.output_bytes * 0.6}) for layer in profile.layers)
    mixed = with_cast_messages(profile.model_copy(update={"layers": mixed}), "float16")
    assert stage_costs(mixed, CUT, 2, LINE).comm[1] == pytest.approx(5 + 1.4)
    assert (
        stage_costs(with_cast_messages(profile, "float32"), CUT, 2, LINE).comm
        == stage_costs(profile, CUT, 2, LINE).comm
    )
    double = profile.model_copy(update={"dtype": "float64"})
    assert stage_costs(with_cast_messages(double, "bfloat16"), CUT, 2, LINE).comm == pytest.approx(
        (1.05, 5.5, 1.05, 1.05)
    )


def test_gradient_sums(profile):
    """Two hosts with a pipeline of two each: stage 0 on devices 0 and 2, so one float32 vector crosses at 0.2 s a byte
    (two devices a host share one link), 2 * 1/2 of it, in two messages."""
    cut = [(0, 1, 2), (3, 4, 5)]
    costs = stage_costs(profile, cut, 2, [(0, 1), (2, 3)])
    own = 4 * (60 + 20 + 20 - 50), 4 * (20 + 20 + 55 - 50)
    assert costs.all_reduce == pytest.approx([2 * 5 + 0.2 * size for size in own])
    # The tied matrix: over all four devices, after the others; then each stage updates all it holds.
    tied = 4 * 50
    levels = 2 * 5 + 0.2 * tied / 2 + 2 * (1 + 0.01 * tied / 2)
    flat = 2 * 2 * 5 + 2 * 3 / 4 * 0.1 * tied
    assert costs.update == pytest.approx([0.1 * 100 + min(levels, flat), 0.1 * 95 + min(levels, flat)])


def test_copies_of_one_pipeline_are_its_replicas(profile):
    schedule = replicate(generate("chimera", Shape(devices=4, microbatches=4)), 2)
    one = generate("chimera", Shape(devices=4, microbatches=4)).placement
    assert stage_costs(profile, CUT, 2, one, copies=2) == costs_of(profile, CUT, 2, schedule)


def test_without_replicas_only_the_tied_matrix_is_summed(profile):
    costs = stage_costs(profile, CUT, 2, LINE)
    assert costs.all_reduce == (0, 0, 0, 0)
    tied = 2 * 5 + 0.1 * 200 * 2  # between hosts, whose link is shared with the two other devices
    assert costs.update == pytest.approx([0.1 * 80 + tied, 0.1 * 20, 0.1 * 20, 0.1 * 75 + tied])
    alone = stage_costs(profile, [range(6)], 2, [(0,)])
    assert alone.update == pytest.approx([0.1 * (60 + 80 + 55 - 50)])


def test_a_matrix_shared_inside_a_stage_counts_once(profile):
    assert parameters(profile, range(6)) == 145
    assert parameters(profile, [0, 1]) == 80


def test_the_table_runs(profile):
    """Costs of a replicated Chimera, end to end: gradient sums make the simulated step longer."""
    schedule = replicate(generate("chimera", Shape(devices=4, microbatches=4)), 2)
    costs = costs_of(profile, CUT, 2, schedule)
    assert simulate(place_gradient_sync(schedule, "lazy", costs), costs).makespan > simulate(schedule, costs).makespan


@pytest.mark.parametrize(
    ("cut", "placement", "words"),
    [
        ([(0, 1), (2, 3)], [(0, 1)], "does not divide 6 layers"),
        ([(0, 1, 2), (2, 3, 4, 5)], [(0, 1)], "does not divide 6 layers"),
        ([(3, 4, 5), (0, 1, 2)], [(0, 1)], "in order"),
        ([(0, 1, 2, 3, 4, 5), ()], [(0, 1)], "does not divide 6 layers"),
        ([(0, 1, 2), (3, 4, 5)], [(0, 1, 2)], "has 3 stages, the cut 2"),
    ],
)
def test_cuts_that_are_none(profile, cut, placement, words):
    with pytest.raises(SpecError, match=words):
        stage_costs(profile, cut, 2, placement)


def check_placed(row: tuple[int, ...], copies: int, hosts: Hosts, holders: list[int]) -> None:
    """Both numberings, against every copy's devices one by one."""
    width = len(row)
    for innermost in get_args(Innermost):
        placed = Placed.of([row], copies, hosts, innermost)

        def host(copy: int, d: int, first: str = innermost) -> int:
            return hosts.of(d * copies + copy if first == "replicas" else copy * width + d)

        on = [host(copy, d) for copy in range(copies) for d in holders]
        assert placed.layout(holders) == Layout(len(set(on)), max(map(on.count, on)))
        for (a, b), result in zip(pairwise(row), placed.crossings(), strict=True):
            ends = [(host(copy, a), host(copy, b)) for copy in range(copies)]
            out = [[x for x, y in ends if x != y], [y for x, y in ends if x != y]]
            assert max(result) == max((way.count(h) for way in out for h in way), default=0)
            assert (0 in result) == any(x == y for x, y in ends)


def test_copies_counted_by_turns_are_where_each_of_them_is() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        width, copies, per_host = rng.randint(1, 9), rng.randint(1, 40), rng.randint(1, 12)
        row = tuple(rng.sample(range(width), width))
        check_placed(row, copies, Hosts(per_host), rng.sample(range(width), rng.randint(1, width)))


def _host_of(device: int, counts: list[int], per_host: int) -> int:
    owner = [host for host, count in enumerate(counts) for _ in range(count)]
    owner += [len(counts) + n // per_host for n in range(device + 1)]
    return owner[device]


def test_hosts_of_different_sizes_are_counted_device_by_device() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        width, copies, per_host = rng.randint(1, 6), rng.randint(1, 6), rng.randint(1, 8)
        counts = [rng.randint(1, per_host) for _ in range(rng.randint(0, 5))]
        hosts = Hosts(per_host, tuple(counts))
        every = range(width * copies)
        where = [_host_of(d, counts, per_host) for d in every]
        assert [hosts.of(d) for d in every] == where
        assert hosts.of_first(len(every)) == tuple(where.count(h) for h in dict.fromkeys(where))
        assert hosts.busy(len(every)) == max(map(where.count, where))
        check_placed(tuple(rng.sample(range(width), width)), copies, hosts, [0])


def test_links_by_host_where_hosts_differ(profile):
    """Hosts of three devices and one: the last link crosses, not the middle one; gradients meet over both hosts."""
    uneven = profile.on_hosts((3, 1))
    assert stage_costs(uneven, CUT, 2, LINE).links[:3] == (1.2, 1.2, 7)
    assert stage_costs(profile.on_hosts((4,)), CUT, 2, LINE).links[:3] == (1.2, 1.2, 1.2)
    assert stage_costs(profile.on_hosts((2, 2)), CUT, 2, LINE) == stage_costs(profile, CUT, 2, LINE)
    cut = [(0, 1, 2), (3, 4, 5)]
    # Copies (0, 1) and (2, 3) on hosts of 1 + 3: stage 0 on devices 0 and 2, stage 1 on 1 and 3, of one host.
    inside = stage_costs(profile.on_hosts((1, 3)), cut, 2, [(0, 1), (2, 3)]).all_reduce[1]
    assert inside == pytest.approx(2 * 1 + 0.01 * 4 * (20 + 20 + 55 - 50))


def test_which_links_are_used_depends_on_which_devices_are_neighbours(profile):
    """Two hosts of two devices, two stages, two copies: one way sums cross between hosts, the other way messages do."""
    hosts = profile.model_copy(update={"devices_per_host": 2})
    cut, line = (tuple(range(3)), tuple(range(3, 6))), [(0, 1)]
    inside, between = (stage_costs(hosts, cut, 2, line, copies=2, innermost=way) for way in get_args(Innermost))
    size = hosts.layers[2].sent_bytes * 2
    assert inside.links[0] == hosts.inside.seconds(size)
    both = hosts.between.alpha_s + 2 * size * hosts.between.beta_s_per_byte  # both copies send at the same time
    assert between.links[0] == both
    cards = hosts.model_copy(update={"host_links": 2})
    assert stage_costs(cards, cut, 2, line, copies=2, innermost="replicas").links[0] == hosts.between.seconds(size)
    own = 4 * (60 + 2 * 20 - 50)  # bytes of the first stage's gradients but for the tied matrix, within a host
    assert between.all_reduce[0] == pytest.approx(2 * 1 + 0.01 * own)
    assert inside.all_reduce[0] == pytest.approx(2 * 5 + 0.1 * own * 2)  # two stages' sums share the link
    sharding = Sharding(levels=(3, 3))
    near = with_sharding(between, hosts, cut, line, sharding, 2, "replicas")
    assert near.gather[0] == near.reduce_scatter[0] == pytest.approx(1 + 0.01 * own / 2 + 0.01 * 4 * 50 / 2)
    far = with_sharding(inside, hosts, cut, line, sharding, 2)
    assert far.gather[0] == pytest.approx(5 + 0.1 * (own + 4 * 50) / 2 * 2)


def test_times_of_stages_are_those_of_their_layers() -> None:
    """Each kind of stage once: stages alike but for names, with attention, of a slice, and none alike."""
    block = {"parameters": 10, "kept_bytes": 1.0, "output_bytes": 1.0, "attention_share": 0.25}
    times = {1: TaskTimes(forward=1.0, input_grad=1.1, weight_grad=0.9, joint=1.7, recompute=1.2)}
    alike = [LayerProfile(name=f"block.{n}", times=times, **block) for n in range(3)]
    other = alike[0].model_copy(update={"name": "other", "attention_share": 0.5})
    layers = (*alike, other)
    result = times_of_stages(layers)
    assert result is times_of_stages(layers)
    assert result.kinds == [0, 0, 0, 3]
    for stage in ((0, 1), (1, 2), (2, 3), (3,)):
        assert result.times(stage, 2.0, 0.9, 2) == stage_times([layers[i] for i in stage], 2.0, 0.9, 2)
        shares = sum(layers[i].attention_share for i in stage)
        assert result.attention(stage, 1.0, 1.0, 1)[0] == pytest.approx(shares)
