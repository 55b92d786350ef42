"""Cutting pieces into stages: against trying every cut there is."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import SpecError
from raypipe.plan.cut.exact import Memory, bottlenecks
from raypipe.plan.cut.layers import cut_layers, fastest_cut, line_of
from raypipe.schedule.shape import Shape
from raypipe.search.placements import placed


def every_cut(pieces, stages):
    for cuts in combinations(range(1, pieces), stages - 1):
        yield (0, *cuts)


def best(costs, placement, memory=None):
    """(slowest device, slowest stage) of the best cut, by trying all."""
    result = []
    for starts in every_cut(len(costs), len(placement[0])):
        parts = [range(a, b) for a, b in pairwise([*starts, len(costs)])]
        stage = [sum(costs[i] for i in part) for part in parts]
        devices = {}
        need = {}
        for row in placement:
            for s, device in enumerate(row):
                devices[device] = devices.get(device, 0) + stage[s] / len(placement)
                if memory is not None:
                    held = {n: v for i in parts[s] for n, v in memory.weights[i].items()}
                    kept = memory.live[s] * sum(memory.kept_bytes[i] for i in parts[s])
                    need[device] = need.get(device, 0) + sum(held.values()) + kept
        if all(v <= memory.limit_bytes for v in need.values()) if memory is not None else True:
            result.append((max(devices.values()), max(stage)))
    return min(result, default=None)


PLACEMENTS = {
    "line": [line_of(1), line_of(3), line_of(5)],
    "v": [placed("v", Shape(devices=d, microbatches=4, chunks=2)) for d in (1, 2, 3)],
    "ring": [placed("ring", Shape(devices=d, microbatches=4, chunks=2)) for d in (2, 3)],
    "bidirectional": [placed("bidirectional", Shape(devices=d, microbatches=4)) for d in (2, 4)],
}
ALL = [placement for kind in PLACEMENTS.values() for placement in kind]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=6, max_size=11), st.sampled_from(ALL))
def test_no_cut_is_better(costs, placement):
    result = cut_layers(costs, placement)
    wanted = best(costs, placement)
    assert (max(result.device_cost), max(result.stage_cost)) == pytest.approx(wanted, abs=1e-9)
    assert result.proven
    assert [i for part in result.stages for i in part] == list(range(len(costs)))
    assert all(len(part) for part in result.stages)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(ALL))
def test_no_cut_that_fits_is_better(seed, placement):
    draw = random.Random(seed)
    n, stages = draw.randint(6, 10), len(placement[0])
    costs = [draw.randint(1, 9) for _ in range(n)]
    weights = [{f"w{i}": draw.randint(1, 5)} for i in range(n)]
    weights[-1]["w0"] = weights[0]["w0"]  # tied
    live = [draw.randint(1, 3) for _ in range(stages)]
    memory = Memory(
        limit_bytes=draw.randint(6, 60), weights=weights, kept_bytes=[draw.randint(0, 3) for _ in costs], live=live
    )
    wanted = best(costs, placement, memory)
    if wanted is None:
        with pytest.raises(SpecError, match="no cut into"):
            cut_layers(costs, placement, memory)
        return
    result = cut_layers(costs, placement, memory)
    assert (max(result.device_cost), max(result.stage_cost)) == pytest.approx(wanted, abs=1e-9)
    assert max(result.device_bytes) <= memory.limit_bytes


@pytest.mark.parametrize("kind", ["ring", "v"])
def test_three_chunks_come_close(kind):
    """No exact method there: the cut is within a piece of the bound, and says so itself."""
    draw = random.Random(0)
    placement = placed(kind, Shape(devices=4, microbatches=4, chunks=3))
    for _ in range(5):
        costs = [draw.uniform(1, 3) for _ in range(60)]
        result = cut_layers(costs, placement)
        assert sum(costs) / 4 <= result.bound * (1 + 1e-12)
        assert result.bound <= max(result.device_cost) <= result.bound * 1.03


def test_uneven_stages_where_the_head_is_heavy():
    """Merak cuts GPT-2's 98 sub-graphs 27/26/24/21 into four stages: the last holds the vocabulary."""
    attention, mlp, head = 1.0, 2.0, 13.0
    costs = [0.1, *[attention, mlp] * 48, head]
    result = cut_layers(costs, line_of(4))
    sizes = [len(part) for part in result.stages]
    assert sum(sizes) == 98
    assert sizes[-1] < min(sizes[:-1])
    assert max(result.stage_cost) == pytest.approx(bottlenecks(costs, 4)[-1], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ring", "v"])
def test_many_pieces_are_cut_in_no_time(kind):
    result = cut_layers([1.0] * 199 + [20.0], placed(kind, Shape(devices=8, microbatches=8, chunks=2)))
    assert max(result.device_cost) == 28  # 219 over 8 devices is 27.4, and all pieces but one are of size 1


def test_the_error_says_what_would_do():
    memory = Memory(limit_bytes=5 * 2**20, weights=[{str(i): 4.0 * 2**20} for i in range(4)], kept_bytes=[0.0] * 4,
                    live=(2.0, 1.0))  # fmt: skip
    with pytest.raises(SpecError, match="fits the 5 MiB of a device; the leanest needs 8 MiB"):
        cut_layers([1.0] * 4, line_of(2), memory)
    with pytest.raises(SpecError, match="5 stages for a model of 4 layers"):
        cut_layers([1.0] * 4, line_of(5))


def sums(costs, starts):
    return [sum(costs[a:b]) for a, b in pairwise([*starts, len(costs)])]


@pytest.mark.parametrize("seed", range(12))
def test_balanced_stages_are_the_most_even_and_of_those_the_ones_with_late_large_stages(seed):
    rng = random.Random(seed)
    costs = [rng.choice([1.0, 1.0, 1.0, 0.1, 2.7]) for _ in range(rng.randint(4, 9))]
    for parts in range(1, len(costs) + 1):
        every = [(c, sums(costs, c)) for c in every_cut(len(costs), parts)]
        slowest = min(max(s) for _, s in every)
        even = [(sum(x * x for x in s), c) for c, s in every if max(s) <= slowest * (1 + 1e-9)]
        least = min(square for square, _ in even)
        expected = min(c[::-1] for square, c in even if square <= least * (1 + 1e-9))[::-1]
        assert cut_layers(costs, line_of(parts)).starts == expected
        known = bottlenecks(costs, parts)[-1]
        assert cut_layers(costs, line_of(parts), balance="stages", slowest_stage=known).starts == expected


def test_the_step_decides_between_even_stages_and_even_devices():
    placement = placed("v", Shape(devices=2, microbatches=4, chunks=2))
    costs = [1.0] * 7 + [5.0]
    devices, stages = cut_layers(costs, placement), cut_layers(costs, placement, balance="stages")
    assert devices.slowest < stages.slowest
    assert fastest_cut(costs, placement, lambda cut: cut.slowest).starts == devices.starts
    assert fastest_cut(costs, placement, lambda cut: -cut.slowest).starts == stages.starts
    # On a line they are the same: nothing to simulate.
    assert fastest_cut(costs, line_of(3), lambda cut: 1 / 0).starts == cut_layers(costs, line_of(3)).starts
