"""What an attempt at a run reports, and the devices that it goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.errors import CheckpointError, DeviceError, DevicesError, TransportError
from raypipe.job.spec import job_from
from raypipe.observe.run_log import RunLog
from raypipe.runtime.cluster import attempts
from raypipe.runtime.hosts.devices import DeviceRequest


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


class Standing:
    """Devices of which a node is gone, or none."""

    def __init__(self, broken: bool) -> None:
        self.broken = broken

    def is_broken(self) -> bool:
        return self.broken


LOST = TransportError("device 1", "its connection ended", "see its log")


@pytest.mark.parametrize(
    ("events", "cause", "broken", "replaces"),
    [
        (["run", "started"], LOST, False, True),
        (["run", "started", "failed", "restarted", "started"], LOST, False, True),
        (["run", "started", "failed", "restarted"], LOST, False, False),  # it failed while workers were set up
        (["run", "started", *["failed", "restarted", "started"] * 2], LOST, False, False),  # train.max_failures
        (["run", "started", *["failed", "restarted", "started"] * 2, "run", "started"], LOST, False, True),
        (["run", "started"], LOST, True, False),  # a node is gone
        (["run", "started"], DeviceError("device 1", "IndexError"), False, False),
        (["run", "started"], DeviceError("device 1", "no memory", kind="memory"), False, False),
    ],
)
def test_workers_that_live_go_on_only_where_that_mends_the_failure(
    events: list[str], cause: Exception, broken: bool, replaces: bool, tmp_path: Path
) -> None:
    log = RunLog(tmp_path)
    for event in events:
        log.event(event)
    log.close()
    job = job_from(
        {
            "name": "small", "model": {"type": "gpt", "layers": 2, "hidden": 8, "heads": 2, "sequence": 8},
            "data": {"type": "bytes", "path": "text"}, "train": {"steps": 2, "batch": 4, "max_failures": 2},
            "parallel": {"schedule": "1f1b", "stages": 2, "microbatch": 2},
        }
    )  # fmt: skip
    devices: Any = Standing(broken)
    request = attempts.RunRequest(job, tmp_path, False, DeviceRequest(1, 0), devices)
    assert attempts._replaces(request, devices, cause) is replaces
