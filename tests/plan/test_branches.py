"""Graphs of layers on devices: steps that can be written down, beside the best chain's."""

from __future__ import annotations

import pytest

from raypipe.errors import SpecError
from raypipe.graph.liveness import Result
from raypipe.plan.branches import Arranged, LayerCosts, choose_branches
from raypipe.schedule.verify import verify
from raypipe.simulate.engine import simulate
from tests.plan.chains import as_chain, best_chain


def costs(results: list[Result], forward: list[float], size: float = 8.0, **link: float) -> LayerCosts:
    """Layers whose input and weight gradients take as long as their forward; every result is as large."""
    sizes = (size,) * len(results)
    times = tuple(forward)
    return LayerCosts(
        results=tuple(results), result_bytes=sizes, gradient_bytes=sizes, forward=times, input_grad=times,
        weight_grad=times, **link,
    )  # fmt: skip


TOWERS = [Result(0, (1,)), Result(1, (4,)), Result(2, (3,)), Result(3, (4,))]
"""Layers 0-1 and 2-3 are towers, 4 compares them."""


def test_two_towers_take_no_time_to_fill() -> None:
    """On two devices a chain takes (N + 1)(F + B + W) of a tower; branches take N of them."""
    of = costs(TOWERS, [1.0, 1.0, 1.0, 1.0, 0.0])
    chain, branches = best_chain(of, 2, 4), choose_branches(of, 2, 4, move_s=0.5)
    assert branches.makespan_s == pytest.approx(4 * 6)
    assert chain.makespan_s > branches.makespan_s
    verify(branches.schedule)
    timed = simulate(branches.schedule, branches.arranged.table)
    assert timed.makespan == pytest.approx(branches.makespan_s)
    assert branches.arranged.sent_bytes == 16.0, "one tower's result, and its gradient"


def test_what_a_chain_carries_along_goes_straight_to_its_readers() -> None:
    """Layers 0 to 3 in a row, and 3 reads layer 0's result too; the first and the last are on one device."""
    of = costs([Result(0, (1, 3)), Result(1, (2,)), Result(2, (3,))], [1.0] * 4)
    branches = Arranged.as_branches(of, [0, 1, 1, 0])
    assert branches.cut == ((0,), (1, 2), (3,))
    assert branches.graph.edges == ((0, 1), (0, 2), (1, 2))
    chain = as_chain(of, branches.cut, branches.devices)
    assert (branches.sent_bytes, chain.sent_bytes) == (2 * 16.0, 3 * 16.0)


def test_branches_of_a_single_microbatch_run_side_by_side() -> None:
    """A stem, two branches of 6 and what joins them; one message there and one back are on the longest path."""
    of = costs([Result(0, (1, 2)), Result(1, (3,)), Result(2, (3,))], [1.0, 6.0, 6.0, 1.0], latency_s=0.5)
    result = choose_branches(of, 2, 1, move_s=0.5)
    assert result.makespan_s == pytest.approx(3 * (1 + 6 + 1) + 2 * 0.5)
    assert best_chain(of, 2, 1).makespan_s == pytest.approx(3 * 14 + 2 * 0.5)


def test_more_devices_than_pieces_are_refused() -> None:
    with pytest.raises(SpecError, match="6 devices for a model of 5 pieces"):
        choose_branches(costs(TOWERS, [1.0] * 5), 6, 1)
