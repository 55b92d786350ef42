"""What an attempt at a run reports, and the devices that it goes on with."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from raypipe.errors import CheckpointError, DeviceError, DevicesError, SpecError, TransportError
from raypipe.observe.run_log import EVENTS, RunLog, read_rows
from raypipe.runtime.cluster import attempts
from tests.job_files import PIPELINE, TINY_GPT, minimal_job


class FullStorage:
    """Takes no checkpoint."""

    def put(self, path: Path, keep: int) -> None:
        raise CheckpointError("s3://full", "has no room", "make some")


def test_a_copy_that_fails_fails_the_attempt(tmp_path: Path) -> None:
    storage: Any = FullStorage()
    with pytest.raises(CheckpointError, match="has no room"), attempts._Reporter(storage, 1) as reporter:
        reporter.saved(3, tmp_path, {})


def test_what_failed_before_is_told_rather_than_the_copy(tmp_path: Path) -> None:
    storage: Any = FullStorage()

    def attempt() -> None:
        with attempts._Reporter(storage, 1) as reporter:
            reporter.saved(3, tmp_path, {})
            raise DevicesError("devices", "gone", "wait")

    with pytest.raises(DevicesError, match="gone"):
        attempt()


def test_only_changes_of_this_run_count(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.event("run")
    log.event("resized", reservation="of before")
    log.event("run")
    assert attempts.devices_changed(tmp_path) == []
    log.event("resized", reservation="a")
    log.event("started")
    log.event("resized", reservation="b")
    assert [change["reservation"] for change in attempts.devices_changed(tmp_path)] == ["a", "b"]


def test_a_driver_that_died_while_it_waited_for_devices_waits_again(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for event, awaits in (
        ("paused", True), ("run", False), ("started", False), ("devices_lost", True), ("failed", True),
        ("resized", False), ("paused", True),
    ):  # fmt: skip
        log.event(event)
        assert attempts._awaits_devices(tmp_path) is awaits, event


class Standing:
    """Devices of which a node is gone, or none."""

    def __init__(self, broken: bool) -> None:
        self.broken = broken

    def is_broken(self) -> bool:
        return self.broken


LOST = TransportError("device 1", "its connection ended", "see its log")


FULL = DeviceError("device 1", "no memory", kind="memory")


@pytest.mark.parametrize(
    ("events", "cause", "broken", "serve"),
    [
        (["run", "started"], LOST, False, True),
        (["run", "started", "failed", "restarted", "started"], LOST, False, True),
        (["run", "started", "failed", "restarted"], LOST, False, False),  # it failed while workers were set up
        (["run", "started"], LOST, True, False),  # a node is gone
        (["run", "started"], FULL, False, False),
    ],
)
def test_workers_that_live_serve_on_only_where_that_mends_the_failure(
    events: list[str], cause: Exception, broken: bool, serve: bool, tmp_path: Path
) -> None:
    log = RunLog(tmp_path)
    for event in events:
        log.event(event)
    devices: Any = Standing(broken)
    assert attempts.serves_on(tmp_path, cause, devices) is serve


@pytest.mark.parametrize(
    ("errors", "logged", "status"),
    [
        ([LOST, FULL], ["failed", "restarted", "failed", "less", "restarted", "finished"], None),
        ([LOST] * 3, ["failed", "restarted"] * 2 + ["failed", "error"], 1),  # train.max_failures is 2
        ([LOST, CheckpointError("s3://full", "has no room", "make some")], ["failed", "restarted", "error"], 1),
        ([SpecError("model", "is wrong")], ["error"], 2),
    ],
)
def test_a_driver_makes_attempt_after_attempt(
    errors: list[Exception], logged: list[str], status: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Ray Train's help, as often as a job allows; what would fail again ends the run at once."""
    left = list(errors)

    def attempt(*_: object) -> Any:
        if left:
            raise left.pop(0)
        clock = SimpleNamespace(prediction=None, measured=lambda: None, recorded=None)
        return SimpleNamespace(interrupted=None, paused=None, clock=clock, norm="none", counts={}, memory_bytes=[])

    monkeypatch.setattr(attempts, "_attempt", attempt)
    monkeypatch.setattr(attempts, "plan_with_less", lambda _job, _directory, log, _cause: log.event("less"))
    monkeypatch.setattr(attempts, "save_timelines", lambda *_: None)
    monkeypatch.setattr(attempts, "index_of", lambda _: None)
    log = RunLog(tmp_path)
    log.event("run")
    job = minimal_job(TINY_GPT, "text", PIPELINE, steps=2, max_failures=2)
    devices: Any = SimpleNamespace(is_broken=lambda: False, run_id="0123abcd", of_attempts=list, devices=2)
    with mock.patch.dict(os.environ):  # in which a driver hides GPUs from its process
        attempts.driver_loop(attempts.RunRequest(job, tmp_path, False, devices))
    rows = read_rows(tmp_path / EVENTS)[1:]
    assert [row["event"] for row in rows] == logged
    assert rows[-1].get("exit_status") == status
