"""The table of kinds: what it says about each kind is what the rest does with it."""

from __future__ import annotations

from typing import get_args

from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import dependencies
from raypipe.schedule.ir import Rules, StageGraph, Task, backwards
from raypipe.schedule.kinds import BACKWARD, BOOKKEEPING, COMPUTE, JOINT, KINDS, TRAITS, WEIGHT_GRADIENTS, Kind
from raypipe.schedule.live_activations import deaths

ONE = backwards(StageGraph.chain(1), Rules())


def test_every_kind_has_its_row() -> None:
    assert get_args(Kind) == KINDS


def test_what_computes_is_what_works_on_micro_batches() -> None:
    assert not COMPUTE & BOOKKEEPING
    assert set(KINDS) == COMPUTE | BOOKKEEPING
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
    )
    assert [costs.by_kind(kind) for kind in KINDS] == [
        (2.0,), (3.0,), (5.0,), (8.0,), (7.0,), (17.0,), (19.0,), (0.0,), (11.0,), (13.0,),
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
        assert waits == (BACKWARD if kind in BACKWARD else set())
