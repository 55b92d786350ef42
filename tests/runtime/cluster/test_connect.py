"""Which Ray a command joins: the one that is named or that ``ray start`` put up, never another program's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from raypipe.errors import RunError, SpecError
from raypipe.runtime.cluster import connect as cluster
from tests.runtime.cluster.answering import GRPC, answering

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Addresses that Ray is asked for, on a machine of its own; nothing is started."""
    result: list[str] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **_options: result.append(address))
    monkeypatch.setattr(ray, "shutdown", lambda: result.append("shutdown"))  # it would be that of all tests' own Ray
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    return result


@pytest.fixture
def listening() -> Iterator[str]:
    """What answers as a gRPC server does, which sends its settings first."""
    with answering(GRPC) as address:
        yield address


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


def failing(message: str) -> Callable[..., None]:
    def init(address: str, **_options: object) -> None:
        raise Exception(message)

    return init


def test_a_ray_that_does_not_come_up_is_one_error(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", failing("The current node timed out during startup. This could happen\nbecause"))
    with pytest.raises(RunError) as caught:
        cluster.connect(2)
    assert caught.value.exit_status == 1
    assert "did not start on this machine: Exception: The current node timed out" in caught.value.why
    assert "\n" not in caught.value.why
    assert "less busy" in caught.value.fix
    assert asked == ["shutdown"]


def test_a_root_without_bash_is_named_before_workers_are_waited_for(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RunError, match="bash"):
        cluster.connect(2)
    assert not asked


def test_what_answers_and_is_no_ray_is_one_error(
    asked: list[str], listening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", listening)
    monkeypatch.setattr(ray, "init", failing("Version mismatch: the cluster was started with Ray 2.9"))
    with pytest.raises(SpecError, match="Version mismatch"):
        cluster.connect(2)


def test_a_cluster_may_have_an_ipv6_address(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(GRPC, "::1") as address:
        assert address.startswith("[::1]:")
        monkeypatch.setenv("RAY_ADDRESS", address)
        cluster.connect(2)
    assert asked == [address]


@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"220 mail\r\n"])
def test_another_server_is_not_taken_for_ray(asked: list[str], words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would try for five minutes, and then end the process."""
    monkeypatch.setattr(cluster, "ANSWER_S", 0.2)
    with answering(words) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(SpecError, match=r"no Ray cluster"):
            cluster.connect(2)
    assert asked == []


@pytest.mark.runs
def test_a_real_one_is_taken_for_ray(local_ray: None) -> None:
    cluster._check_reachable(ray.get_runtime_context().gcs_address)
