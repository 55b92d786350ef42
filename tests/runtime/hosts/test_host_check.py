"""Nodes that cannot run a job together are named before training, with what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from raypipe.errors import ClusterError
from raypipe.runtime.hosts import host_check
from raypipe.runtime.hosts.host_check import (
    HostQuestion,
    HostReport,
    apart,
    judge,
    no_answer,
    report_host,
    versions,
)

OWN = {"Python": "3.11", "ray": "2.60.0", "torch": "2.13.0", "raypipe": "0.1.0 (source 0123abcd)"}
GOOD = HostReport("10.0.0.2", OWN, shared=True, has_data=True, refusal="", network=None)
RUN = Path("/runs/a")


def test_nodes_that_agree_may_train() -> None:
    judge([GOOD, replace(GOOD, address="10.0.0.3")], OWN)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"shared": False, "has_data": False}, "node 10.0.0.2 does not share /runs/a with the driver"),
        ({"has_data": False}, "node 10.0.0.2 does not see the prepared data in /runs/a/data"),
        ({"refusal": "Permission denied"}, "node 10.0.0.2 cannot write checkpoints into /runs/a: Permission"),
    ],
)
def test_a_node_apart_is_said_and_served(change, says) -> None:
    report = replace(GOOD, **change)
    judge([report], OWN)
    result = apart(report, RUN)
    assert result.startswith(says)
    assert (says == "") == (result == "")
    assert not result or result.endswith("its data and checkpoints go through Ray")


@pytest.mark.parametrize(
    ("change", "says"),
    [
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
        judge([GOOD, replace(GOOD, address="10.0.0.3", **change)], OWN)
    assert caught.value.exit_status == 2


def test_a_node_that_does_not_answer_is_named() -> None:
    nodes = [SimpleNamespace(address="10.0.0.3"), SimpleNamespace(address="10.0.0.4")]
    said = str(no_answer(nodes, RUN, 60.0))  # type: ignore[arg-type]
    assert said.startswith("node 10.0.0.3, 10.0.0.4: did not answer within 60 s")


def test_a_report_says_what_is_there(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(host_check, "LOOK_AGAIN_S", 0.001)
    monkeypatch.setattr(host_check, "use_interface", lambda *_: None)
    ask = HostQuestion(tmp_path, ".shared-1", "10.0.0.1", one_host=False)
    assert not report_host(ask, "10.0.0.2").shared
    (tmp_path / ".shared-1").write_text("of another run")
    assert not report_host(ask, "10.0.0.2").shared
    (tmp_path / ".shared-1").write_text(".shared-1")
    result = report_host(ask, "10.0.0.2")
    assert (result.shared, result.has_data, result.refusal) == (True, False, "")
    assert result.versions == versions()
    assert [p.name for p in tmp_path.iterdir()] == [".shared-1"]


def test_a_folder_that_cannot_be_written_into(tmp_path, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(host_check, "use_interface", lambda *_: None)
    (tmp_path / ".shared-1").write_text(".shared-1")
    monkeypatch.setattr(Path, "touch", refuse)
    result = report_host(HostQuestion(tmp_path, ".shared-1", "10.0.0.1", one_host=False), "10.0.0.2")
    assert (result.shared, result.refusal) == (True, "Permission denied")
