"""The table of kinds against what the rest does with it, and families against what they make."""

from __future__ import annotations

from typing import get_args

import pytest

from raypipe.schedule import SCHEDULES, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import dependencies
from raypipe.schedule.ir import Rules, StageGraph, Task, backwards
from raypipe.schedule.kinds import (
    BACKWARD,
    BOOKKEEPING,
    COMPUTE,
    EXCHANGES,
    JOINT,
    KINDS,
    TRAITS,
    WEIGHT_GRADIENTS,
    Kind,
)
from raypipe.schedule.live_activations import deaths
from raypipe.schedule.shape import Shape

ONE = backwards(StageGraph.chain(1), Rules())


def test_every_kind_has_its_row() -> None:
    assert get_args(Kind) == KINDS


def test_what_computes_is_what_works_on_micro_batches() -> None:
    assert not COMPUTE & BOOKKEEPING
    assert set(KINDS) == COMPUTE | BOOKKEEPING | EXCHANGES
    assert not EXCHANGES & (COMPUTE | BOOKKEEPING)
    for kind in KINDS:
        assert bool(deaths(Task(kind, 0, (0,)), ONE)) == (kind in WEIGHT_GRADIENTS)


def test_times_come_from_the_named_costs() -> None:
    costs = CostTable(
        forward=(2.0,),
        input_grad=(3.0,),
        weight_grad=(5.0,),
        recompute=(7.0,),
        all_reduce=(11.0,),
        update=(13.0,),
        gather=(17.0,),
        reduce_scatter=(19.0,),
        dispatch=(23.0,),
        combine=(29.0,),
    )
    assert [costs.by_kind(kind) for kind in KINDS] == [
        (2.0,), (3.0,), (5.0,), (8.0,), (7.0,), (23.0,), (29.0,), (29.0,), (23.0,),
        (17.0,), (19.0,), (0.0,), (11.0,), (13.0,),
    ]  # fmt: skip


def test_a_joint_default_time_is_the_sum_of_its_parts() -> None:
    single = {traits.cost[0]: traits.default_time for traits in TRAITS.values() if len(traits.cost) == 1}
    for kind in JOINT:
        assert TRAITS[kind].default_time == sum(single[name] for name in TRAITS[kind].cost)


def test_a_backward_waits_for_the_backward_of_the_stage_behind() -> None:
    for kind in KINDS:
        waits = {
            k for kinds, stage, _ in dependencies(kind, 0, [], [1], False, Rules(), ONE[0]) if stage == 1 for k in kinds
        }
        assert waits == (BACKWARD if kind in BACKWARD | {"DB"} else set())


# What a family says of itself, against what it makes.


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, family in SCHEDULES.items() if family.fills])
def test_all_forwards_of_a_unit_come_before_its_first_weight_gradient(name: str) -> None:
    chunked, united = ({"chunks", "unit"} & SCHEDULES[name].options == {*o} for o in (("chunks",), ("chunks", "unit")))
    for devices in (2, 3, 4, 7):
        for chunks in (1, 2, 3, 8) if chunked or united else (1,):
            for count in (1, 2, 3, 5, 8, 15, 31):
                for unit in (count, 2, 2 * devices - 1) if united else (None,):
                    if unit is not None and unit > count:
                        continue
                    made = generate(name, Shape(devices=devices, microbatches=count, chunks=chunks, unit=unit))
                    for order in made.orders:
                        first = next(i for i, task in enumerate(order) if task.kind in ("W", "BW"))
                        own = {t.stage for t in order}
                        before = {(t.stage, t.mbs[0]) for t in order[:first] if t.kind == "F"}
                        assert before >= {(s, m) for s in own for m in range(unit or count)}
