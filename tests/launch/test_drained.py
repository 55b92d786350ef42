"""A run that cannot change its devices saves a checkpoint when one of its nodes will go, once per node."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import RaySystemError

from raypipe.launch.elastic import DrainedNodes
from raypipe.observe.run_dir import asked_to_save
from raypipe.observe.run_log import EVENTS, read_rows
from raypipe.runtime.hosts import autoscaler


def unanswered() -> set[str]:
    raise RaySystemError("GCS is not available")


def test_a_node_that_will_go_asks_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going: set[str] = set()
    monkeypatch.setattr(autoscaler, "drained_nodes", lambda: going)
    drained = DrainedNodes(tmp_path, SimpleNamespace(nodes=lambda: {"a", "b"}))  # type: ignore[arg-type]
    drained.look()
    going.add("c")
    drained.look()
    assert not asked_to_save(tmp_path)
    for node in ("a", "b"):
        going.add(node)
        drained.look()
        assert asked_to_save(tmp_path)
        drained.look()
        assert not asked_to_save(tmp_path)
    monkeypatch.setattr(autoscaler, "drained_nodes", unanswered)
    drained.look()
    assert [row["message"][-1] for row in read_rows(tmp_path / EVENTS)] == ["a", "b"]
