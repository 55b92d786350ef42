"""The stand-in for CUDA graphs goes wrong where they would."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from raypipe.runtime.graphs.device_graphs import GraphError
from tests.runtime.graphs.recorded import FreedMemoryError, RecordedGraphs

ONES = torch.ones(3)


def test_a_replay_reads_and_writes_the_memory_of_the_capture() -> None:
    graphs, x, total = RecordedGraphs(), torch.ones(3), torch.zeros(3)

    def work() -> torch.Tensor:
        y = (x * 2).view(3, 1)
        total.add_(y[:, 0])
        return y

    graph, y = graphs.capture(work, graphs.new_pool())
    assert y.isnan().all(), "capturing runs nothing"
    assert torch.equal(total, torch.zeros(3))
    for factor in (1, 5):
        x.fill_(factor)
        graph.replay()
        assert torch.equal(y, torch.full((3, 1), 2.0 * factor))
    assert torch.equal(total, 12 * ONES)
    kept = y.clone()
    x.zero_()
    graph.replay()
    assert torch.equal(y, torch.zeros(3, 1))  # what had been there is overwritten
    assert torch.equal(kept, torch.full((3, 1), 10.0))


def test_numbers_of_the_host_stay_what_they_were() -> None:
    graphs, x, rate = RecordedGraphs(), torch.ones(3), 0.5
    graph, y = graphs.capture(lambda: x * rate, graphs.new_pool())
    rate = 0.25
    graph.replay()
    assert torch.equal(y, 0.5 * ONES)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(), lambda x: float(x.sum()), lambda x: x.tolist(), lambda x: x.numpy(),
        lambda x: bool((x > 0).all()), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: torch.tensor([1.0, 2.0]),
    ],
)  # fmt: skip
def test_the_host_reads_nothing_in_a_capture(read) -> None:
    graphs, x = RecordedGraphs(), torch.ones(3)
    with pytest.raises(GraphError, match="not permitted"):
        graphs.capture(lambda: read(x.mul_(2)), graphs.new_pool())
    assert torch.equal(x, ONES), "nothing has run"


def test_memory_that_was_freed_is_found_out() -> None:
    graphs, x = RecordedGraphs(), torch.ones(3)
    graph, _ = graphs.capture(partial(torch.mul, x, 2), graphs.new_pool())
    del x
    with pytest.raises(FreedMemoryError):
        graph.replay()


def test_graphs_of_one_pool_are_replayed_in_order() -> None:
    """A later capture gets the memory of what an earlier one has let go of."""
    for pools in (1, 2):
        graphs, x = RecordedGraphs(), torch.ones(3)
        pool = graphs.new_pool()
        first, _ = graphs.capture(lambda x=x: (x * 2).sum(), pool)
        second, y = graphs.capture(lambda x=x: x * 3, pool if pools == 1 else graphs.new_pool())
        first.replay()
        second.replay()
        assert torch.equal(y, 3 * ONES)
        first.replay()
        assert torch.equal(y, 3 * ONES) == (pools == 2)


def test_results_that_nobody_holds_are_lost() -> None:
    graphs, x = RecordedGraphs(), torch.ones(3)
    pool = graphs.new_pool()
    graph, y = graphs.capture(lambda: x * 2, pool)
    graph.replay()
    address = y.data_ptr()
    del y
    _, z = graphs.capture(lambda: x * 3, pool)
    assert z.data_ptr() == address
