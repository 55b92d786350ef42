"""Which Ray a command joins: the one that is named or that ``ray start`` put up, never another program's own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from raypipe.runtime import cluster

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Addresses that Ray is asked for, on a machine of its own; nothing is started."""
    found: list[str] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **_options: found.append(address))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    return found


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def started(folder: Path, address: str) -> None:
    """What ``ray start`` leaves behind."""
    (folder / "ray").mkdir()
    (folder / "ray" / "ray_current_cluster").write_text(address)


def test_nothing_is_joined_that_ray_start_did_not_put_up(asked: list[str]) -> None:
    """``ray.init(address="auto")`` would take any Ray it finds, and end with it."""
    cluster.connect(2)
    assert asked == ["local"]


def test_what_ray_start_put_up_is_joined_and_said(
    asked: list[str], tmp_path: Path, listening: str, capsys: Captured
) -> None:
    started(tmp_path, listening)
    cluster.connect(2)
    said = capsys.readouterr()
    assert asked == [listening]
    assert said.out == ""
    assert listening in said.err
    assert "RAY_ADDRESS=local" in said.err


def test_where_it_has_gone_a_fresh_one_is_started(asked: list[str], tmp_path: Path) -> None:
    started(tmp_path, "127.0.0.1:1")
    cluster.connect(2)
    assert asked == ["local"]


def test_a_named_one_is_joined_without_a_word(
    asked: list[str], tmp_path: Path, listening: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    started(tmp_path, "127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", listening)
    cluster.connect(2)
    assert asked == [listening]
    assert capsys.readouterr().err == ""


def test_one_that_is_locked_is_left_alone(
    asked: list[str], tmp_path: Path, listening: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def init(address: str, **_options: object) -> None:
        asked.append(address)
        if address != "local":
            raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray, "init", init)
    started(tmp_path, listening)
    cluster.connect(2)
    assert asked == [listening, "local"]
    assert "RAY_AUTH_MODE=token" in capsys.readouterr().err
