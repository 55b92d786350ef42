"""Loads of experts that another order evens out: when that is told, and what a plan is expected to gain."""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.cost.experts import with_divided_experts
from raypipe.cost.profile import busiest, even_order
from raypipe.errors import SpecError
from raypipe.plan.choose import choose
from raypipe.plan.online.uneven_experts import WINDOW, UnevenExperts, evened
from raypipe.plan.plan import Plan
from raypipe.plan.tensor_groups import expert_order
from tests.plan.conftest import make_job
from tests.plan.test_experts import measured

LAYERS = sum(layer.experts is not None for layer in measured(8).layers)


@given(st.lists(st.integers(0, 50), min_size=4, max_size=8), st.sampled_from([2, 4]))
def test_even_orders(loads: list[int], group: int) -> None:
    """Each expert once, never less even than ascending; close to the best of all ways to divide them."""
    loads = loads[: len(loads) // group * group]
    held = len(loads) // group
    order = even_order(loads, group)
    if order:
        assert sorted(order) == list(range(len(loads)))
        assert busiest(loads, order, group) < busiest(loads, (), group)
    if group == 2 and sum(loads):
        best = min(max(sum(own), sum(loads) - sum(own)) for own in combinations(loads, held)) / (sum(loads) / group)
        assert best <= busiest(loads, order, group) * (1 + 1e-12)
        assert busiest(loads, order, group) <= 4 / 3 * best  # of such lists, by hand: the rule's own bound


def test_another_order_is_told_once_it_gains_enough() -> None:
    """Copies of two experts each; the first gets 3 + 3 of 8 tokens, and 3 + 1 in the best order."""
    uneven = {"layers.0": np.array([3, 3, 1, 1]), "layers.1": np.array([2, 2, 2, 2])}
    watch = UnevenExperts(2, ())
    steps = [watch.observe(uneven) for _ in range(3 * WINDOW)]
    (told,) = [event for step in steps for event in step]
    assert steps[WINDOW - 1] == [told]  # and not again while it stays so
    assert told.fields["now"] == pytest.approx((1.5 + 1) / 2)
    assert told.fields["best"] == pytest.approx(1)
    assert told.fields["loads"] == [[150, 150, 50, 50], [100] * 4]
    assert not any(UnevenExperts(2, ((0, 2, 1, 3), (0, 1, 2, 3))).observe(uneven) for _ in range(2 * WINDOW))
    worse = {"layers.0": np.array([4, 4, 0, 0]), "layers.1": np.array([4, 4, 0, 0])}
    assert [len(watch.observe(worse)) for _ in range(WINDOW)] == [0] * (WINDOW - 1) + [1]


def test_a_plan_with_even_loads_is_expected_to_gain_what_they_cost() -> None:
    """The order of the plan counts, and the best of all orders is found for these few experts."""
    job = make_job(layers=4, parallel={"auto": True, "experts": 2, "replicas": 4, "stages": 1})
    profile = measured(8)
    loads = [(4.0, 3.0, 1.0, 0.0)] * LAYERS
    plan = choose(job, profile, 4, search_s=0).plan
    assert plan.parallel.expert_order == ()
    result = evened(job, profile, plan, loads)
    assert result is not None
    was_s, better = result
    assert isinstance(better, Plan)
    assert better.differences(job) == plan.differences(job)
    orders = better.parallel.expert_order
    assert all(busiest(own, order, 2) == 1.0 for own, order in zip(loads, orders, strict=True))  # 4 + 0 and 3 + 1
    assert better.predicted_step_s is not None
    assert better.predicted_step_s == pytest.approx(plan.predicted_step_s)  # which counted even loads
    assert was_s > 1.1 * better.predicted_step_s
    again = evened(job, profile, better, loads)
    assert again is not None
    assert again[0] == pytest.approx(better.predicted_step_s)
    assert evened(job, profile, plan, loads[:1]) is None
    assert evened(job, with_divided_experts(profile, 2), plan, loads) is None
    best = min(busiest(loads[0], order, 2) for order in permutations(range(4)))
    assert best == 1.0


def test_the_planner_orders_experts_by_measured_loads() -> None:
    job = make_job(layers=4, parallel={"auto": True, "experts": 2, "replicas": 4, "stages": 1})
    profile = measured(8, (2.0, 1.5, 0.5, 0.0))
    chosen = choose(job, profile, 4, search_s=0)
    assert chosen.plan.parallel.expert_order == expert_order(profile, 2) == ((0, 3, 1, 2),) * LAYERS
    assert chosen.plan.differences(job) == []
    even = choose(job, measured(8, (1.0,) * 4), 4, search_s=0)
    assert even.plan.parallel.expert_order == ()
    assert chosen.best.step_s == pytest.approx(even.best.step_s)  # no copy waits
    own = make_job(layers=4, parallel={**job.parallel.given, "auto": True, "expert_order": [[0, 1, 2, 3]] * LAYERS})
    given_order = choose(own, profile, 4, search_s=0)
    assert given_order.plan.parallel.expert_order == ((0, 1, 2, 3),) * LAYERS
    assert given_order.best.step_s > 1.1 * even.best.step_s
    for orders, why in (
        ([[0, 1, 2, 3]], f"1 orders for {LAYERS} layers with experts"),
        ([[0, 1, 2, 9]] * LAYERS, "does not name each of the 4 experts of layer 1 once"),
    ):
        wrong = make_job(layers=4, parallel={**job.parallel.given, "auto": True, "expert_order": orders})
        with pytest.raises(SpecError, match=why):
            choose(wrong, profile, 4, search_s=0)
