"""Nodes that cannot run a job together are named before training, with what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from raypipe.errors import ClusterError
from raypipe.runtime.cluster import host_check
from raypipe.runtime.cluster.host_check import HostQuestion, HostReport, judge, report_host, silent, versions

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
        ({"shared": False, "has_data": False}, r"node 10\.0\.0\.3: has other storage under /runs/a .*all nodes mount"),
        ({"has_data": False}, r"node 10\.0\.0\.3: does not see the prepared data in /runs/a/data"),
        ({"refusal": "Permission denied"}, r"node 10\.0\.0\.3: cannot write checkpoints into /runs/a: Permission"),
        ({"network": ClusterError("node 10.0.0.3", "no interface", "")}, r"node 10\.0\.0\.3: no interface"),
        *(
            ({"versions": OWN | {name: "0.0"}}, rf"node 10\.0\.0\.3: has {name} 0\.0, and the driver {OWN[name][:6]}")
            for name in OWN
        ),
    ],
)
def test_the_node_that_does_not_fit_is_named(change, says) -> None:
    with pytest.raises(ClusterError, match=f"(?s){says}") as caught:
        judge([GOOD, replace(GOOD, address="10.0.0.3", **change)], RUN, OWN)
    assert caught.value.exit_status == 2


def test_a_report_says_what_is_there(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(host_check, "LOOK_AGAIN_S", 0.001)
    monkeypatch.setattr(host_check, "use_interface", lambda *_: None)
    ask = HostQuestion(tmp_path, ".shared-1", "10.0.0.1", one_host=False)
    assert not report_host(ask, "10.0.0.2").shared
    (tmp_path / ".shared-1").write_text("of another run")
    assert not report_host(ask, "10.0.0.2").shared
    (tmp_path / ".shared-1").write_text(".shared-1")
    found = report_host(ask, "10.0.0.2")
    assert (found.shared, found.has_data, found.refusal) == (True, False, "")
    assert found.versions == versions()
    assert [p.name for p in tmp_path.iterdir()] == [".shared-1"]


def test_a_folder_that_cannot_be_written_into(tmp_path, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(host_check, "use_interface", lambda *_: None)
    (tmp_path / ".shared-1").write_text(".shared-1")
    monkeypatch.setattr(Path, "touch", refuse)
    found = report_host(HostQuestion(tmp_path, ".shared-1", "10.0.0.1", one_host=False), "10.0.0.2")
    assert (found.shared, found.refusal) == (True, "Permission denied")


def test_a_node_that_does_not_answer_is_named() -> None:
    nodes = [SimpleNamespace(address="10.0.0.3"), SimpleNamespace(address="10.0.0.4")]
    assert str(silent(nodes, RUN)).startswith("node 10.0.0.3, 10.0.0.4: did not answer")  # type: ignore[arg-type]
