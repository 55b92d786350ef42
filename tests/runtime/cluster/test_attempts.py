"""What an attempt at a run reports, and the devices that it goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.errors import CheckpointError, DevicesError
from raypipe.observe.run_log import RunLog
from raypipe.runtime.cluster import attempts


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
    log.close()
    assert [change["reservation"] for change in attempts.devices_changed(tmp_path)] == ["a", "b"]


def test_a_driver_that_died_while_it_waited_for_devices_waits_again(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for event, awaits in (
        ("paused", True), ("run", False), ("started", False), ("devices_lost", True), ("failed", True),
        ("resized", False), ("paused", True),
    ):  # fmt: skip
        log.event(event)
        assert attempts._awaits_devices(tmp_path) is awaits, event
    log.close()
