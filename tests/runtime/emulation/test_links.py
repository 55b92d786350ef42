"""The emulated network by hand: two stages and two copies on two hosts of two devices, either way round."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from raypipe.errors import ScheduleError
from raypipe.runtime.emulation.emulated_run import rehearsal
from raypipe.runtime.emulation.links import Links
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import StageGraph
from raypipe.schedule.passes import shard
from raypipe.schedule.shape import Innermost

ALIKE = Links(latency_s=0.5, bytes_per_s=10.0, message_bytes=1.0, gradient_bytes=4.0)
PIPELINE = generate("1f1b", Shape(devices=2, microbatches=4))


def on_hosts(innermost: Innermost) -> Links:
    return Links(
        latency_s=0.5, bytes_per_s=10.0, message_bytes=1.0, gradient_bytes=4.0, per_host=2, inside_bytes_per_s=100.0,
        innermost=innermost,
    )  # fmt: skip


def test_what_leaves_a_host_at_once_shares_its_link() -> None:
    stages, replicas = (rehearsal(PIPELINE, CostTable.even(2), on_hosts(way), 2).costs for way in get_args(Innermost))
    assert stages.links[0] == pytest.approx(0.5 + 1 / 100)
    assert replicas.links[0] == pytest.approx(0.5 + 2 / 10)  # both copies' messages
    assert stages.all_reduce == pytest.approx((2 * 0.5 + 4 / 5,) * 2)  # both stages' sums
    assert replicas.all_reduce == pytest.approx((2 * 0.5 + 4 / 100,) * 2)


def test_shard_groups_have_the_links_of_their_own_devices() -> None:
    """Of four copies on two hosts of four devices, pairs share a host either way; sums between pairs do not."""
    whole = shard(PIPELINE, 3, group=2)
    for way in get_args(Innermost):
        links = Links(bytes_per_s=10.0, gradient_bytes=4.0, per_host=4, inside_bytes_per_s=100.0, innermost=way)
        result = rehearsal(whole, CostTable.even(2), links, 4).costs
        assert result.gather == result.reduce_scatter == pytest.approx((2 / 100,) * 2)
    assert result.all_reduce == pytest.approx((2 / 100,) * 2)  # the copies of a stage are all on one host


def test_links_that_are_alike_stay_as_they_were() -> None:
    result = rehearsal(PIPELINE, CostTable.even(2), ALIKE, 2)
    assert (result.costs.links[0], result.seconds_per_message) == (0.5, 0.1)
    assert result.costs.all_reduce == pytest.approx((2 * 0.5 + 4 / 10,) * 2)


def test_a_graph_of_stages_is_refused() -> None:
    graph = replace(PIPELINE, graph=StageGraph(2, ()))
    with pytest.raises(ScheduleError, match="per_host"):
        rehearsal(graph, CostTable.even(2), on_hosts("stages"), 1)
