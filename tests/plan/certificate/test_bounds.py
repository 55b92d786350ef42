"""Certificates hold: no cut, placement and order of tiny models is shorter, and no plan of any family."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from raypipe.cost.profile import LayerProfile
from raypipe.errors import ScheduleError
from raypipe.plan.candidate import grids
from raypipe.plan.certificate.assigned import assigned_bound
from raypipe.plan.certificate.closed import (
    MOMENTS,
    MemoryTime,
    closed_bound,
    idle_while_filling,
    largest_layers,
    memory_time,
    one_microbatch,
    shared_work,
    spread_bound,
    whole_layers,
)
from raypipe.plan.certificate.instance import alike
from raypipe.plan.certificate.of_plan import Certifier
from raypipe.plan.choice import deepest
from raypipe.plan.joint.annealing import LeastStep
from raypipe.plan.joint.arrangement import Arrangement
from raypipe.plan.predict.predictor import Predictor
from raypipe.schedule.costs import CostTable
from raypipe.search import search
from raypipe.simulate.period import period
from tests.exhaustive import exhaustive
from tests.plan.certificate.exact import arrangements, least_order, optimum
from tests.plan.conftest import make_job, make_profile


def tiny(seed: int):
    """At most 4 layers, 3 devices, 4 micro-batches; with messages, and with little memory or without a limit."""
    rng = random.Random(seed)
    layers, devices = rng.choice([(4, 2), (3, 3), (4, 3), (3, 2)])
    times = [[rng.randint(1, 9) for _ in range(layers)] for _ in range(3)]
    if rng.random() < 0.5:  # a large head
        times = [[*row[:-1], 3 * row[-1]] for row in times]
    count = rng.randint(1, 4 if layers == 3 else 3)
    kept = [rng.randint(1, 4) for _ in range(layers)]
    room = rng.choice([None, max(max(kept), sum(kept) // devices + rng.randint(0, 3))])
    return times, devices, count, rng.choice([0, 1, 4]), kept, room


def frozen(layer: LayerProfile, parameters: int, trained: int) -> LayerProfile:
    """A layer of so many parameters of which so many are trained, and which has next to no W."""
    times = {
        n: t.model_copy(update={"weight_grad": 0.01 * t.weight_grad, "joint": t.input_grad + 0.01 * t.weight_grad})
        for n, t in layer.times.items()
    }
    return layer.model_copy(update={"parameters": parameters, "trained_parameters": trained, "times": times})


def both(i, known):
    """The bound in closed form and the one by integer programming."""
    return closed_bound(i), assigned_bound(i, known, 2.0).bound_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(6), *exhaustive(*range(6, 16))])
def test_no_cut_placement_and_order_is_shorter(seed) -> None:
    times, devices, count, message, kept, room = tiny(seed)
    best = optimum(*times, devices, count, message, kept, room)
    if best == 10**9:
        pytest.skip("nothing fits")
    i = alike(*times, devices, count, message, float("inf") if room is None else float(room), kept)
    closed, assigned = both(i, best * 1.5)
    assert closed <= assigned <= best * (1 + 1e-9)
    assert closed >= count * sum(map(sum, times)) / devices


@pytest.mark.slow
@pytest.mark.parametrize("first", [200, *exhaustive(*range(208, 296, 8))])
def test_no_order_is_shorter_where_memory_is_tight(first) -> None:
    """Eight more instances each, with memory for little more than one micro-batch, and some for a second one; also of
    what is bounded for the best arrangement of each by its stages."""
    seen = 0
    for seed in range(first, first + 8):
        times, devices, count, message, kept, _ = tiny(seed)
        room = max(max(kept), sum(kept) // devices + seed % 7)
        best = optimum(*times, devices, count, message, kept, room)
        if best == 10**9:
            continue
        i = alike(*times, devices, count, message, float(room), kept)
        closed, assigned = both(i, best * 1.5)
        assert closed <= assigned <= best * (1 + 1e-9), seed
        every = [Arrangement(starts, row, len(kept)) for starts, row in arrangements(len(kept), devices)]
        assert min(map(LeastStep(i).of, every)) <= best * (1 + 1e-9), seed
        seen += 1
    assert seen > 3


@pytest.mark.slow
@pytest.mark.parametrize("first", [400, *exhaustive(*range(410, 500, 10))])
def test_no_order_of_an_arrangement_is_shorter_than_its_own_bound(first) -> None:
    """Four arrangements of each instance, with little memory and without a limit; half of the bounds are close."""
    gaps = []
    for seed in range(first, first + 10):
        times, devices, count, message, kept, _ = tiny(seed)
        rng = random.Random(seed)
        for starts, row in rng.sample(list(arrangements(len(kept), devices)), 4):
            used = 1 + max(row)
            held = [sum(kept[starts[s] : e]) for s, e in enumerate((*starts[1:], len(kept)))]
            room = max(sum(h for h, d in zip(held, row, strict=True) if d == own) for own in range(used))
            for limit in (None, room + seed % 5):
                best = least_order(starts, row, *times, count, message, kept, limit, 10**5)
                i = alike(*times, used, count, message, float("inf") if limit is None else float(limit), kept)
                bound = LeastStep(i).of(Arrangement(starts, row, len(kept)))
                assert bound <= best * (1 + 1e-9), (seed, starts, row, limit)
                gaps.append(best / bound - 1)
    assert sorted(gaps)[len(gaps) // 2] < 0.05


def test_whole_layers() -> None:
    """26 equal blocks and a head of six and a half on four devices: nine blocks, or two beside the head."""
    times = [[2.0] * 26 + [13.0]] * 3
    i = replace(alike(*times, 4, 100), barrier=False)
    assert shared_work(i) == 100 * (26 * 6 + 39) / 4
    assert whole_layers(i, [0.0] * 4, shared_work(i)) == pytest.approx(100 * (2 * 6 + 39), rel=1e-3)
    assert whole_layers(i, [0.0] * 4, shared_work(i)) <= 100 * (2 * 6 + 39)


@pytest.mark.slow
def test_bounds_come_close_to_the_optimum() -> None:
    """Else they would be true and of no use: with memory enough, half of the tiny models within 3 %."""
    gaps = []
    for seed in range(16):
        times, devices, count, message, kept, _ = tiny(seed)
        best = optimum(*times, devices, count, message)
        i = alike(*times, devices, count, message, kept=kept)
        gaps.append(best / assigned_bound(i, best * 1.5, 2.0).bound_s - 1)
    assert sorted(gaps)[len(gaps) // 2] < 0.03
    assert max(gaps) < 0.15


@pytest.mark.parametrize("seed", range(12))
def test_without_a_barrier_no_period_is_shorter(seed) -> None:
    """Periods of searched orders of random arrangements, by the simulator's own fixed point."""
    times, devices, count, message, kept, room = tiny(100 + seed)
    rng = random.Random(seed)
    i = replace(alike(*times, devices, count, float(message), kept=kept), barrier=False)
    every = [(s, r) for s, r in arrangements(len(kept), devices)]
    for starts, row in rng.sample(every, min(8, len(every))):
        a = Arrangement(starts, row, len(kept))
        sums = [tuple(float(sum(x[k] for k in own)) for own in a.cut) for x in times]
        zeros = (0.0,) * len(starts)
        costs = CostTable(
            forward=sums[0], input_grad=sums[1], weight_grad=sums[2], recompute=zeros, all_reduce=zeros, update=zeros,
            comm=float(message),
        )  # fmt: skip
        sizes = [(float(sum(kept[k] for k in own)),) * 2 for own in a.cut]
        limit = max(
            float(room or 1e9), max(sum(z for (z, _), d in zip(sizes, row, strict=True) if d == e) for e in row)
        )
        result = search((row,), count, costs, budget_s=0.02, objective="period", sizes=sizes, memory_limit=limit)
        step = period(result.schedule, costs)
        one = replace(i, room=(limit,) * devices)
        assert max(both(one, 2 * step)) <= step * (1 + 1e-9)


def test_each_bound_on_cases_whose_answer_is_plain() -> None:
    even = alike([1] * 8, [1] * 8, [1] * 8, 4, 8)
    assert shared_work(even) == (8 * 24 + 0 + 1 + 2 + 3) / 4  # all work, and devices that begin after 0 to 3 forwards
    head = alike([1, 1, 1, 9], [1, 1, 1, 9], [1, 1, 1, 9], 4, 10, message=2)
    assert largest_layers(head) == 10 * 27 + 3 + 2  # the head alone, after three forwards and a message
    assert largest_layers(alike([1] * 5, [1] * 5, [1] * 5, 4, 10)) >= 10 * 6  # some device has two of five
    assert one_microbatch(alike([1] * 4, [2] * 4, [0] * 4, 4, 1, message=100)) == 12  # on one device, no message
    # On three devices two messages there and two back, or a third of all work; to frozen layers no message leads back.
    half = alike([1] * 4, [0, 0, 2, 2], [0] * 4, 4, 4, message=1)
    assert (one_microbatch(half), one_microbatch(replace(half, frozen_first=2))) == (12, 32 / 3)
    # Room for one activation of each layer: from its F to the end of its B and W, 2 N times over.
    tight = alike([1, 1], [1, 1], [1, 1], 2, 10, room=1.0)
    recomputed = memory_time(tight)
    assert recomputed <= 10 * (4 + 2 + 2) / 2
    assert recomputed > shared_work(replace(tight, room=(float("inf"),) * 2, barrier=False))


@pytest.mark.parametrize("seed", range(40))
def test_memory_and_work_are_traded_as_well_as_can_be(seed) -> None:
    """The dual of the linear program: its best price of memory is where some layer may as well be kept as not."""
    rng = random.Random(seed)
    layers, devices, count, room = rng.randint(1, 6), rng.randint(1, 4), rng.randint(1, 9), rng.uniform(0.5, 20)
    held, again = (np.array([rng.choice([0.0, *[rng.uniform(0.1, 2)] * 4]) for _ in range(layers)]) for _ in range(2))
    work, always = rng.uniform(1, 9), rng.choice([0.0, rng.uniform(0, 3)])
    area, time = count * held / room, count * again / devices
    with np.errstate(invalid="ignore"):
        prices = [0.0, 1.0, *np.nan_to_num(time / (area + time)).tolist()]
    best = max(
        price * count * always / room
        + (1 - price) * count * work / devices
        + float(np.minimum(price * area, (1 - price) * time).sum())
        for price in prices
    )
    assert MemoryTime(held, again, work, always).least(count, devices, room) == pytest.approx(best, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "clip", "trained"),
    [
        (0, None, 1.0), (1, 1.0, 1.0), (0, 1.0, 0.01), (1, None, -1.0),
        *exhaustive((0, 1.0, 1.0), (1, None, 1.0), *itertools.product(range(2, 6), (None, 1.0), (-1.0, 0.01, 1.0))),
    ],
)  # fmt: skip
def test_no_plan_of_any_family_beats_its_certificate(seed, clip, trained) -> None:
    """Every schedule, recomputed and divided ones too, on several grids, with links and updates of all sizes, and of
    models of which only some weights are trained (below 0: none of the first half)."""
    rng = random.Random(seed)
    link = {"alpha_s": 2e-4, "beta_s_per_byte": 1 / rng.choice([1e8, 4e9])}
    profile = make_profile(
        layers=rng.choice([4, 6]), devices=4, seed=seed, memory_bytes=rng.choice([0.4, 0.7, 8]) * 2**30,
        update_s_per_parameter=rng.choice([2e-9, 2e-8]), task_overhead_s=rng.choice([0.0, 5e-4]),
        alone=rng.choice([1.0, 0.8]), inside=link, between=link,
    )  # fmt: skip
    if trained < 1:
        # Large enough that the frozen ones' gradients and optimizer state would not fit.
        layers = [(layer, 20 * layer.parameters) for layer in profile.layers]
        half = len(layers) // 2 if trained < 0 else 0
        update = {
            "layers": tuple(
                frozen(layer, n, 0 if k < half else round(abs(trained) * n)) for k, (layer, n) in enumerate(layers)
            )
        }
        profile = profile.model_copy(update={**update, "memory_bytes": (1.2 if trained > 0 else 4) * 2**30})
    job = make_job(layers=len(profile.layers) - 2, batch=8, clip=clip)
    judge = Predictor(profile, job.train, deepest(job, profile))
    certifier, seen = Certifier(judge), 0
    for grid in grids(4, 8, judge.most_stages, 1, 4):
        for made in judge.on(grid):
            for c in (made, replace(made, update="wait"), replace(made, recompute="layers")):
                if rng.random() < 0.6 or (c.form.recomputes and c.recompute != "none"):
                    continue
                try:
                    p = judge.predict(c)
                except ScheduleError:
                    continue
                if not p.fits:
                    continue
                i = certifier.instance(p)
                seen += 1
                if p.form.replicas > 1:
                    assert spread_bound(i) <= p.step_s * (1 + 1e-9), c
                    continue
                assert closed_bound(i) <= p.step_s * (1 + 1e-9), c
                if seen % 12 == 0:
                    assert assigned_bound(i, 2 * p.step_s, 0.3).bound_s <= p.step_s * (1 + 1e-6), c
    assert seen > 20


def test_a_certificate_says_what_binds() -> None:
    i = alike([1] * 8, [1] * 8, [1] * 8, 4, 64)
    from raypipe.plan.certificate.of_plan import _binding

    assert _binding(replace(i, barrier=False), closed_bound(replace(i, barrier=False)), closed_bound) == "compute"
    few = alike([1] * 8, [1] * 8, [1] * 8, 8, 4)
    assert _binding(few, closed_bound(few), closed_bound) == "barrier"
    slow = alike([1] * 8, [1] * 8, [1] * 8, 8, 4, message=50)
    assert _binding(slow, closed_bound(slow), closed_bound) == "link"
    tight = alike([1] * 8, [1] * 8, [1] * 8, 4, 64, room=2.0)
    assert _binding(tight, closed_bound(tight), closed_bound) == "memory"


# What devices can have done while a pipeline fills, against flow shops in which every layer has its own device.


def done_by(moment: float, forward: list[float], order: list[list[int]]) -> float:
    """Seconds of forwards done by a moment; ``order``: of micro-batches, per layer."""
    ended = dict.fromkeys(order[0], 0.0)
    total = 0.0
    for seconds, row in zip(forward, order, strict=True):
        free = 0.0
        for m in row:
            start = max(free, ended[m])
            free = ended[m] = start + seconds
            total += min(seconds, max(0.0, moment - start))
    return total


@pytest.mark.parametrize("seed", range(40))
def test_no_flow_shop_does_more(seed) -> None:
    rng = random.Random(seed)
    layers, count = rng.randint(1, 12), rng.randint(1, 8)
    forward = [rng.choice((0.0, 0.1, 1.0, rng.uniform(1, 2), 4.0)) for _ in range(layers)]
    ids = list(range(count))
    orders = [[ids] * layers, [rng.sample(ids, count) for _ in range(layers)]]
    moments = [sum(forward) * k / (MOMENTS - 1) for k in range(MOMENTS)]
    for devices, idle in enumerate(idle_while_filling(forward, count, layers), 1):
        for order in orders:
            assert max(devices * u - done_by(u, forward, order) for u in moments) >= idle - 1e-9


def test_even_layers_cost_what_is_before_each_device() -> None:
    assert idle_while_filling([1.0] * 8, 16, 4) == pytest.approx([0, 1, 1 + 2, 1 + 2 + 3], rel=0.02)


def test_a_slow_first_layer_holds_all_others_up() -> None:
    # By 5 s the four layers can have done 5, 2, 1 and 1 s of forwards. The second and the third device begin after 2
    # and 3 s at the earliest, which alone would be 5 s for three.
    forward = [2.0, 1.0, 1.0, 1.0]
    assert idle_while_filling(forward, 16, 3)[2] == pytest.approx(3 * 5 - 9)
    assert idle_while_filling(forward, 1, 2) == pytest.approx([0.0, 5.0])  # one micro-batch, one device at work
