"""Nodes that cannot run a job together are named before training, with what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from raypipe.errors import ClusterError
from raypipe.runtime.cluster.host_check import judge, no_answer
from raypipe.runtime.cluster.host_report import HostReport

OWN = {"Python": "3.11", "ray": "2.60.0", "torch": "2.13.0", "raypipe": "0.1.0 (source 0123abcd)"}
GOOD = HostReport("10.0.0.2", OWN, shared=True, has_data=True, refusal="", network=None)
RUN = Path("/runs/a")


def test_nodes_that_agree_may_train() -> None:
    judge([GOOD, replace(GOOD, address="10.0.0.3")], RUN, OWN)


def test_where_nothing_is_written_storage_does_not_matter() -> None:
    judge([replace(GOOD, shared=False, has_data=False)], None, OWN)
    with pytest.raises(ClusterError, match=r"has torch 1\.0"):
        judge([replace(GOOD, versions=OWN | {"torch": "1.0"})], None, OWN)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"shared": False, "has_data": False},
            r"node 10\.0\.0\.3: does not share /runs/a with the driver.*all nodes mount",
        ),
        ({"has_data": False}, r"node 10\.0\.0\.3: does not see the prepared data in /runs/a/data"),
        ({"refusal": "Permission denied"}, r"node 10\.0\.0\.3: cannot write checkpoints into /runs/a: Permission"),
        ({"network": ClusterError("node 10.0.0.3", "no interface", "")}, r"node 10\.0\.0\.3: no interface"),
        *(
            (
                {"versions": OWN | {name: "0.0"}},
                rf"node 10\.0\.0\.3: has {name} 0\.0, but the driver has {OWN[name][:6]}",
            )
            for name in OWN
        ),
    ],
)
def test_the_node_that_does_not_fit_is_named(change, says) -> None:
    with pytest.raises(ClusterError, match=f"(?s){says}") as caught:
        judge([GOOD, replace(GOOD, address="10.0.0.3", **change)], RUN, OWN)
    assert caught.value.exit_status == 2


def test_a_node_that_does_not_answer_is_named() -> None:
    nodes = [SimpleNamespace(address="10.0.0.3"), SimpleNamespace(address="10.0.0.4")]
    said = str(no_answer(nodes, RUN, 60.0))  # type: ignore[arg-type]
    assert said.startswith("node 10.0.0.3, 10.0.0.4: did not answer within 60 s")
