"""Devices are waited for in the open, kept for all attempts at a run, and cleared of what a killed one left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest
import ray
from ray.util import list_named_actors

from raypipe.errors import DevicesError
from raypipe.runtime.hosts.devices import DeviceRequest
from raypipe.runtime.hosts.reserve import Reservation, reserve
from raypipe.runtime.worker.worker_group import Places, start_worker_group, those_that_leave

pytestmark = pytest.mark.runs
FEW = DeviceRequest(cpus=0.01, gpus=0.0)


class Plain:
    def __init__(self, rank: int, title: str) -> None:
        pass

    def locate(self) -> int:
        return 1

    def leave(self) -> None:
        pass


def test_a_wait_is_told_and_ends_when_the_devices_come_free(local_ray) -> None:
    all_of_them = DeviceRequest(cpus=ray.cluster_resources()["CPU"], gpus=0.0)
    free, before = ray.available_resources().get("CPU", 0.0), -1.0
    while free != before:  # what the tests before have left is given back
        time.sleep(3)
        free, before = ray.available_resources().get("CPU", 0.0), free
    assert free > 1
    other = reserve(1, DeviceRequest(cpus=1.0, gpus=0.0), 60.0)
    request = DeviceRequest(cpus=free, gpus=0.0)  # but the other one has a CPU of them
    told: list[str] = []
    timer = threading.Timer(2.5, other.give_back)
    timer.start()
    mine = reserve(1, request, None, told.append)
    mine.give_back()
    timer.join()
    said = re.fullmatch(rf"needs {free:g} CPUs, ([\d.]+) free, waiting 0:0[12]", told[0])
    assert said is not None, told
    # What the tests before have left may come and go meanwhile, such as a stream's actor or a placement group.
    assert float(said[1]) < free
    with pytest.raises(DevicesError, match=r"were not free within 1 s") as caught:
        reserve(2, all_of_them, 1.0)
    assert "wait_for_devices_s" in caught.value.fix


def test_what_a_killed_attempt_left_is_ended_and_its_devices_serve_the_next(local_ray) -> None:
    held = reserve(2, FEW, 60.0)
    try:
        first = start_worker_group(["a", "b"], held.for_attempt(), Plain)
        assert _of(held) == 2
        # The first fleet's driver was killed: nobody has stopped it.
        assert those_that_leave({}, held.of_attempts(), 0) == {}
        _wait_for(lambda: _of(held) == 0)
        second = start_worker_group(["a", "b"], held.for_attempt(), Plain)
        assert second.run_id != first.run_id
        assert _of(held) == 2
        assert second.locations == [1, 1]
        second.stop()
        assert not held.is_broken()  # still the run's
        _wait_for(lambda: _of(held) == 0)
    finally:
        held.give_back()


def _of(held: Any) -> int:
    return sum(f" · {held.run_id}-" in one["name"] for one in list_named_actors(all_namespaces=True))


def _wait_for(there: Any) -> None:
    deadline = time.monotonic() + 20
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Starts:
    """A driver, which starts the workers of an attempt."""

    def start(self, held: Reservation) -> list[int]:
        places = Places(held.for_attempt(), [0, 1], Process)
        self.actors = [places.start(rank, "one") for rank in range(2)]
        standby = places.options(0, f"standby · {places.place.run_id}")
        self.actors.append(ray.remote(Process).options(**{**standby, "num_cpus": 0}).remote(2, "none"))
        return list(ray.get([actor.pid.remote() for actor in self.actors]))


class Process:
    def __init__(self, rank: int, title: str) -> None:
        pass

    def pid(self) -> int:
        return os.getpid()


RESERVES = """
import sys, time, ray
from tests.runtime.hosts.test_reserve import FEW, Starts, reserve
ray.init(logging_level="ERROR", log_to_driver=False)
starts = ray.remote(Starts).options(num_cpus=0).remote()
print(*ray.get(starts.start.remote(reserve(2, FEW, 60.0))), flush=True)
ray.kill(starts)
time.sleep(1000)
"""


def test_workers_of_an_attempt_outlive_its_driver_and_end_with_the_run(local_ray) -> None:
    """Also one that stands by; the process that has reserved their devices is killed."""
    words = [sys.executable, "-c", RESERVES]
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) == 3
        time.sleep(1.0)
        assert [psutil.pid_exists(pid) for pid in pids] == [True] * 3
        run.kill()
    _wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))
