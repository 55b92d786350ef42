"""Tensors on the edges of a stage graph: every stage gets what it reads, and no more crosses than must."""

from __future__ import annotations

import random

import pytest

from raypipe.errors import ScheduleError
from raypipe.graph.liveness import (
    Result,
    StageEnds,
    between_parts,
    check_order,
    live_after,
    stage_ends,
    stage_graph,
    stages_of,
)
from raypipe.schedule.ir import StageGraph


def any_results(draw: random.Random, layers: int) -> tuple[Result, ...]:
    """Results of layers 0 to ``layers`` - 1, each of which reads some earlier ones; all lead to the last."""
    result = []
    for made in range(layers - 1):
        for _ in range(draw.choice([1, 1, 1, 2])):
            later = range(made + 1, layers)
            result.append(Result(made, tuple(sorted(draw.sample(later, min(len(later), draw.choice([1, 1, 2, 3])))))))
    return tuple(result)


def delivered(results: tuple[Result, ...], cut: tuple[tuple[int, ...], ...], ends: tuple[StageEnds, ...]) -> None:
    """Run the stages in order, and check that each has what its layers read, and sends only what it has."""
    had: list[set[int]] = []
    for stage, layers in enumerate(cut):
        arrived = [r for source, some in ends[stage].arrives.items() for r in some if r in had[source]]
        assert sorted(arrived) == sorted(ends[stage].arriving), "sent by a stage that does not have it"
        assert len(set(arrived)) == len(arrived), "arrives twice"
        had.append({*arrived, *(r for r, one in enumerate(results) if one.made_by in layers)})
        assert {r for r, one in enumerate(results) if set(one.read_by) & set(layers)} <= had[stage]
        assert set(ends[stage].leaving) <= had[stage]
        for other, some in ends[stage].leaves.items():
            assert ends[other].arrives[stage] == some


@pytest.mark.parametrize("seed", range(40))
def test_branches_send_each_result_once_to_each_device_that_reads_it(seed: int) -> None:
    draw = random.Random(seed)
    layers, count = draw.randint(2, 14), draw.randint(1, 4)
    results, on = any_results(draw, layers), [draw.randrange(count) for _ in range(layers)]
    cut, devices = stages_of(results, on)
    assert sorted(i for own in cut for i in own) == list(range(layers))
    assert all(on[i] == device for own, device in zip(cut, devices, strict=True) for i in own)
    assert cut[-1][-1] == layers - 1
    check_order(results, cut)
    graph = stage_graph(results, cut, devices)
    assert all(a < b for a, b in graph.edges)
    ends = stage_ends(results, cut, graph, devices)
    delivered(results, cut, ends)
    sent = sorted(
        (r, devices[n])
        for s, one in enumerate(ends) for n, some in one.leaves.items() for r in some if devices[s] != devices[n]
    )  # fmt: skip
    wanted = sorted(
        {(r, on[reader]) for r, one in enumerate(results) for reader in one.read_by if on[reader] != on[one.made_by]}
    )
    assert sent == wanted


@pytest.mark.parametrize("seed", range(20))
def test_in_a_chain_everything_travels_from_stage_to_stage(seed: int) -> None:
    draw = random.Random(seed)
    layers = draw.randint(2, 12)
    results = any_results(draw, layers)
    borders = sorted(draw.sample(range(1, layers), draw.randint(1, layers - 1)))
    cut = tuple(tuple(range(a, b)) for a, b in zip([0, *borders], [*borders, layers], strict=True))
    ends = stage_ends(results, cut, StageGraph.chain(len(cut)))
    delivered(results, cut, ends)
    for s, border in enumerate(borders):
        assert ends[s].leaves == {s + 1: live_after(results, border - 1)}
    # The parts of a stage are such a chain too.
    middle = between_parts(results, cut, (), ())
    assert middle == [live_after(results, border - 1) for border in borders]


def test_parts_pass_on_what_only_arrives_and_leaves() -> None:
    results = (Result(0, (1, 3)), Result(1, (2,)), Result(2, (3,)))
    assert between_parts(results, [[1], [2]], (0,), (0, 2)) == [(0, 1)]


def test_a_stage_that_no_path_reaches_is_named() -> None:
    results = (Result(0, (2,)), Result(1, (2,)))
    with pytest.raises(ScheduleError, match="stage 2 needs a tensor of stage 0"):
        stage_ends(results, [[0], [1], [2]], StageGraph(3, ((1, 2),)))
    with pytest.raises(ScheduleError, match="stage 0 reads a tensor that stage 1 makes"):
        check_order(results, [[2], [0], [1]])


def test_two_towers_begin_together_although_one_device_holds_a_part_of_both() -> None:
    """Layers 0-1 are a text tower, 2-4 an image tower, 5 compares them."""
    results = (Result(0, (1,)), Result(1, (5,)), Result(2, (3,)), Result(3, (4,)), Result(4, (5,)))
    cut, devices = stages_of(results, [0, 0, 0, 1, 1, 1])
    assert (cut, devices) == (((0, 1), (2,), (3, 4), (5,)), (0, 0, 1, 1))
    assert stage_graph(results, cut, devices).edges == ((0, 3), (1, 2), (2, 3))
