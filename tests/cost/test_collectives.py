"""Formulas against the algorithms themselves, played out message by message on data that shows who holds what."""

import math
from fractions import Fraction

import pytest

from raypipe.cost.analytic import analytic_profile
from raypipe.cost.collectives import (
    MODELS,
    Timed,
    TimedCollective,
    along,
    best,
    collective_seconds,
    fit,
    fit_link,
    from_measured,
    terms,
)
from raypipe.cost.hosts import Hosts, Layout
from raypipe.cost.profile import CollectiveFit, CollectivePath, LinkFit
from raypipe.errors import SpecError
from raypipe.job.cluster import cluster_from
from tests.cost.plain_layer import plain_layer

ALPHA, BETA = Fraction(1, 1000), Fraction(1, 7)


class World:
    """Devices with one vector each, of ``group`` blocks of one byte; a block is the set of devices summed into it.

    A message takes alpha + n * beta; every device sends at most one and receives at most one at a time.
    """

    def __init__(self, group, blocks=None):
        self.group = group
        self.held = blocks or [{b: frozenset([d]) for b in range(group)} for d in range(group)]
        self.clock = [Fraction(0)] * group

    def step(self, messages):
        """Messages ``(source, target, blocks, add)`` that all start together; they wait for both ends."""
        payloads, ends = [], {}
        assert len({m[0] for m in messages}) == len(messages) == len({m[1] for m in messages})
        for source, target, blocks, add in messages:
            end = max(self.clock[source], self.clock[target]) + ALPHA + len(blocks) * BETA
            payloads.append((target, {b: self.held[source][b] for b in blocks}, add))
            for device in (source, target):
                ends[device] = max(ends.get(device, 0), end)
        for device, end in ends.items():
            self.clock[device] = end
        for target, blocks, add in payloads:
            for block, summed in blocks.items():
                mine = self.held[target].get(block, frozenset())
                assert not add or not mine & summed, "a contribution would be added twice"
                self.held[target][block] = mine | summed if add else summed

    def drop_but(self, device, blocks):
        self.held[device] = {b: self.held[device][b] for b in blocks}


def ring_reduce_scatter(w):
    r = w.group
    for k in range(r - 1):
        w.step([(d, (d + 1) % r, [(d - k) % r], True) for d in range(r)])
    return {d: (d + 1) % r for d in range(r)}


def ring_all_gather(w, owner):
    r = w.group
    for k in range(r - 1):
        w.step([(d, (d + 1) % r, [(owner[d] - k) % r], False) for d in range(r)])


def halving(w, members, blocks):
    """Recursive halving among a power of two of members; returns each one's range of blocks."""
    span = {d: (0, len(blocks)) for d in members}
    distance = len(members) // 2
    while distance:
        messages = []
        for i, d in enumerate(members):
            peer = members[i ^ distance]
            lo, hi = span[d]
            mid = (lo + hi) // 2
            mine, theirs = ((lo, mid), (mid, hi)) if not i & distance else ((mid, hi), (lo, mid))
            messages.append((d, peer, blocks[slice(*theirs)], True))
            span[d] = mine
        w.step(messages)
        distance //= 2
    return span


def doubling(w, members, blocks, span):
    distance = 1
    while distance < len(members):
        w.step([(d, members[i ^ distance], blocks[slice(*span[d])], False) for i, d in enumerate(members)])
        span = {
            d: (min(span[d][0], span[members[i ^ distance]][0]), max(span[d][1], span[members[i ^ distance]][1]))
            for i, d in enumerate(members)
        }
        distance *= 2


def binomial(w, blocks, to_root, add):
    r, depth = w.group, math.ceil(math.log2(w.group))
    for k in range(depth) if to_root else reversed(range(depth)):
        pairs = [(d + 2**k, d) for d in range(0, r, 2 ** (k + 1)) if d + 2**k < r]
        moves = [(a, b) if to_root else (b, a) for a, b in pairs]
        w.step([(a, b, [x for x in blocks if x in w.held[a]], add) for a, b in moves])


@pytest.mark.parametrize("r", [2, 3, 4, 5, 8, 16])
def test_ring(r):
    w = World(r)
    owner = ring_reduce_scatter(w)
    everyone = frozenset(range(r))
    assert all(w.held[d][owner[d]] == everyone for d in range(r))
    assert max(w.clock) == cost("reduce_scatter", "ring", r)
    ring_all_gather(w, owner)
    assert all(w.held[d][b] == everyone for d in range(r) for b in range(r))
    assert max(w.clock) == cost("all_reduce", "ring", r)
    gather = World(r, [{d: frozenset([d])} for d in range(r)])
    ring_all_gather(gather, {d: d for d in range(r)})
    assert max(gather.clock) == cost("all_gather", "ring", r)


@pytest.mark.parametrize("r", [2, 4, 8, 16])
def test_rabenseifner(r):
    w = World(r)
    members, blocks = list(range(r)), list(range(r))
    span = halving(w, members, blocks)
    assert max(w.clock) == cost("reduce_scatter", "rabenseifner", r)
    doubling(w, members, blocks, span)
    assert all(w.held[d][b] == frozenset(range(r)) for d in range(r) for b in range(r))
    assert max(w.clock) == cost("all_reduce", "rabenseifner", r)
    assert cost("all_reduce", "rabenseifner", r) == 2 * int(math.log2(r)) * ALPHA + Fraction(2 * (r - 1), r) * BETA * r


@pytest.mark.parametrize("r", [3, 6, 12])
def test_rabenseifner_where_some_devices_are_too_many(r):
    """They hand their vector to a neighbour and get the result back."""
    even = 2 ** int(math.log2(r))
    w = World(r)
    w.step([(even + i, i, list(range(r)), True) for i in range(r - even)])
    assert all(w.held[i][b] == {i, even + i} for i in range(r - even) for b in range(r))
    members = list(range(even))
    # Halving needs a number of blocks that halves: play it on the power of two, of bytes of the right size.
    inner = World(even)
    span = halving(inner, members, list(range(even)))
    doubling(inner, members, list(range(even)), span)
    fold = ALPHA + BETA * r
    assert max(w.clock) == fold
    scaled = 2 * int(math.log2(even)) * ALPHA + (max(inner.clock) - 2 * int(math.log2(even)) * ALPHA) * Fraction(
        r, even
    )
    assert 2 * fold + scaled == cost("all_reduce", "rabenseifner", r)


@pytest.mark.parametrize("r", [2, 3, 4, 7, 8])
def test_tree(r):
    w = World(r)
    blocks = list(range(r))
    binomial(w, blocks, to_root=True, add=True)
    assert all(w.held[0][b] == frozenset(range(r)) for b in blocks)
    binomial(w, blocks, to_root=False, add=False)
    assert all(w.held[d][b] == frozenset(range(r)) for d in range(r) for b in blocks)
    assert max(w.clock) == cost("all_reduce", "tree", r)


@pytest.mark.parametrize("r", [2, 4, 8])
def test_tree_all_gather(r):
    w = World(r, [{d: frozenset([d])} for d in range(r)])
    binomial(w, list(range(r)), to_root=True, add=True)
    binomial(w, list(range(r)), to_root=False, add=False)
    assert max(w.clock) == cost("all_gather", "tree", r)


def cost(kind, model, r):
    """The formula for a vector of r bytes, exactly."""
    t = terms(kind, model, r)
    return Fraction(t.alphas) * ALPHA + Fraction(t.vectors).limit_denominator(1000) * BETA * r


def test_one_device_talks_to_nobody():
    assert all(terms("all_reduce", model, 1).seconds(LinkFit(alpha_s=1, beta_s_per_byte=1), 9) == 0 for model in MODELS)


def test_the_best_depends_on_group_and_size():
    link = LinkFit(alpha_s=1e-5, beta_s_per_byte=1e-10)
    seconds = {m: terms("all_reduce", m, 64).seconds(link, 1e9) for m in MODELS}
    assert min(seconds, key=seconds.get) == "rabenseifner"
    assert best("all_reduce", link, 64, 1e9) == seconds["rabenseifner"]
    odd = {m: terms("all_reduce", m, 48).seconds(link, 1e9) for m in MODELS}
    assert min(odd, key=odd.get) == "ring"  # no power of two: folding costs two vectors
    assert best("all_reduce", link, 48, 1e9) == odd["ring"]
    assert best("all_reduce", link, 48, 8) == terms("all_reduce", "rabenseifner", 48).seconds(link, 8)


@pytest.fixture
def profile():
    cluster = cluster_from(
        {
            "name": "c", "hosts": 4, "devices_per_host": 8, "host_links": 2,
            "device": {"name": "d", "memory_gib": 1, "peak_tflops": {"float32": 1}, "memory_gb_s": 1, "efficiency": 1},
            "inside": {"latency_us": 1, "bandwidth_gb_s": 100},
            "between": {"latency_us": 10, "bandwidth_gb_s": 10},
        }
    )  # fmt: skip
    layer = plain_layer("x", flops=1, parameters=1, kept_bytes=1, output_bytes=1)
    return analytic_profile([layer], cluster, "float32", [1])


def test_over_hosts(profile):
    """1 GB: inside 8 devices at 100 GB/s, between hosts at 10 GB/s, two cards a host."""
    gigabyte = 1e9
    one_host = collective_seconds(profile, "all_reduce", gigabyte, Layout(1, 8))
    assert one_host == pytest.approx(2 * 7 / 8 / 100, rel=1e-2)
    one_each = collective_seconds(profile, "all_reduce", gigabyte, Layout(4, 1))
    assert one_each == pytest.approx(2 * 3 / 4 / 10, rel=1e-2)
    crowded = collective_seconds(profile, "all_reduce", gigabyte, Layout(4, 1), sharing=8)  # 8 groups on 2 cards
    assert crowded == pytest.approx(4 * one_each, rel=1e-2)
    # Eighths of the vector cross on two cards, at a quarter of the bandwidth each.
    levels = collective_seconds(profile, "all_reduce", gigabyte, Layout(4, 8))
    assert levels == pytest.approx(one_host + 4 * one_each / 8, rel=1e-2)
    half = [collective_seconds(profile, k, gigabyte, Layout(4, 8)) for k in ("all_gather", "reduce_scatter")]
    assert sum(half) == pytest.approx(levels, rel=1e-2)
    assert collective_seconds(profile, "all_reduce", gigabyte, Layout(1, 1)) == 0
    assert collective_seconds(profile, "all_reduce", 0, Layout(4, 8)) == 0


def test_rings_over_all_cards(profile):
    """A card for each of eight devices: as many rings, which enter a host side by side."""
    rails = profile.model_copy(update={"host_links": 8})
    seconds = collective_seconds(rails, "all_gather", 1e9, Layout(4, 8))
    assert seconds == pytest.approx(31 / 32 / 80, rel=0.04)  # 31 steps' latencies
    shared = collective_seconds(rails, "all_gather", 1e9, Layout(4, 4), sharing=2)  # two groups of four on each host
    assert shared == pytest.approx(15 / 16 / 40, rel=0.02)
    fast = rails.model_copy(update={"between": LinkFit(alpha_s=1e-5, beta_s_per_byte=1e-12)})
    assert collective_seconds(fast, "all_gather", 1e9, Layout(4, 8)) > 7 / 8 / 100  # a device's own link remains


def test_collectives_may_take_another_path_than_messages(profile):
    other = profile.model_copy(update={"collective": CollectivePath(alpha_s=0, beta_s_per_byte=1e-9)})
    assert collective_seconds(other, "all_reduce", 1e9, Layout(4, 1)) == pytest.approx(2 * 3 / 4)
    assert collective_seconds(other, "all_reduce", 1e9, Layout(1, 8)) < 0.1  # inside a host nothing changes


def test_a_library_with_one_algorithm():
    """Three rings of a third one after another, played out, are what the formula says of three pieces."""
    group, whole = 4, 12
    world = World(group)
    for _ in range(3):  # a piece of 12 / 3 bytes is one block of each of the four
        world.held = World(group).held
        ring_all_gather(world, ring_reduce_scatter(world))
    path = CollectivePath(
        alpha_s=float(ALPHA), beta_s_per_byte=float(BETA), algorithm="ring", piece_bytes=whole / 3
    )  # fmt: skip
    assert along("all_reduce", path, group, whole) == pytest.approx(float(max(world.clock)))


def test_pieces_at_once_share_bandwidth_and_hide_latency():
    path = CollectivePath(alpha_s=1, beta_s_per_byte=1, algorithm="tree", piece_bytes=10, at_once=2)
    assert along("all_reduce", path, 2, 40) == 2 * 2 + 2 * 40  # two rounds of two messages; every byte there and back
    assert along("all_reduce", path, 2, 10) == 2 + 2 * 10
    free = path.model_copy(update={"algorithm": None, "piece_bytes": None})
    assert along("all_reduce", free, 8, 1e6) == best("all_reduce", LinkFit(alpha_s=1, beta_s_per_byte=1), 8, 1e6)


def test_measurements_come_before_formulas(profile):
    slow = CollectiveFit(kind="all_reduce", group=4, model="ring", alpha_s=0.5, beta_s_per_byte=1e-6)
    measured = profile.model_copy(update={"collectives": (slow,)})
    assert collective_seconds(measured, "all_reduce", 1e6, Layout(4, 1)) == pytest.approx(6 * 0.5 + 1.5)
    assert collective_seconds(measured, "all_reduce", 1e6, Layout(8, 1)) == pytest.approx(14 * 0.5 + 1.75)
    assert collective_seconds(measured, "all_gather", 1e6, Layout(4, 1)) < 1  # nothing measured: the formula


def test_the_nearest_group_speaks_for_one_not_measured():
    fits = [
        CollectiveFit(kind="all_reduce", group=g, model="ring", alpha_s=a, beta_s_per_byte=0)
        for g, a in ((2, 1.0), (16, 3.0))
    ]
    assert from_measured(fits, 4, 1) == 6 * 1.0
    assert from_measured(fits, 8, 1) == 14 * 3.0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_fit_finds_what_made_the_samples(model, kind):
    link = LinkFit(alpha_s=3e-5, beta_s_per_byte=2e-10)
    samples = [
        TimedCollective(kind, group, size, terms(kind, model, group).seconds(link, size))
        for group in (2, 4, 8, 16)
        for size in (1e3, 1e5, 1e7)
    ]
    fits = fit(samples)
    assert [f.group for f in fits] == [2, 4, 8, 16]
    assert {f.model for f in fits} == {model}
    for result in fits:
        assert result.alpha_s == pytest.approx(3e-5)
        assert result.beta_s_per_byte == pytest.approx(2e-10)
        assert result.error < 1e-9


def test_a_fit_to_noise_is_the_best_in_relative_error():
    """Checked against a fine grid around it."""
    sizes = [1e2, 1e4, 1e6, 1e8]
    times = [1.2e-5, 1.1e-5, 1.3e-4, 9e-3]
    result = fit_link([Timed(s, t) for s, t in zip(sizes, times, strict=True)])

    def squares(alpha, beta):
        return sum(((alpha + beta * s) / t - 1) ** 2 for s, t in zip(sizes, times, strict=True))

    least = squares(result.alpha_s, result.beta_s_per_byte)
    for i in range(-20, 21):
        for j in range(-20, 21):
            assert least <= squares(result.alpha_s * (1 + i / 100), result.beta_s_per_byte * (1 + j / 100)) + 1e-12
    assert result.error == pytest.approx(max(abs(result.seconds(s) / t - 1) for s, t in zip(sizes, times, strict=True)))


def test_negative_costs_do_not_exist():
    """Larger messages that came out faster: no bandwidth can be read off, and no negative one is."""
    result = fit_link([Timed(1e3, 2e-5), Timed(1e6, 1e-5)])
    assert result.alpha_s > 0
    assert result.beta_s_per_byte == 0
    steep = fit_link([Timed(10, 1e-6), Timed(1000, 1e-3)])
    assert steep.alpha_s == 0
    assert steep.beta_s_per_byte > 0


def test_what_cannot_be_fitted():
    with pytest.raises(SpecError, match="two or more"):
        fit_link([Timed(5, 1), Timed(5, 2)])
    with pytest.raises(SpecError, match="all_reduce over 4 devices"):
        fit([TimedCollective("all_reduce", 4, 10, 1.0)])
    with pytest.raises(SpecError, match="above 0"):
        fit_link([Timed(5, 0), Timed(6, 2)])


def test_layouts():
    assert Layout.of([0, 1, 2, 3], Hosts(8)) == Layout(1, 4)
    assert Layout.of([0, 8, 16], Hosts(8)) == Layout(3, 1)
    assert Layout.of(range(32), Hosts(8)).group == 32
    assert Layout.of([5], Hosts(1)) == Layout(1, 1)
