"""The place that a device leaves is there after its process was killed, and names the first stuck task."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raypipe.runtime.recovery.flight_recorder import (
    DevicePlace,
    FlightRecorder,
    ask_places,
    first_stuck,
    read_left,
    read_places,
    stuck_message,
)
from raypipe.runtime.setup.communicators import Location
from raypipe.runtime.transport.channel import Peer
from raypipe.schedule import Shape, generate
from raypipe.schedule.lowering.programs import programs

CHILD = """
import pathlib, sys, time
from tests.runtime.recovery.test_flight_recorder import PROGRAMS, recorder
one = recorder(pathlib.Path(sys.argv[1]), 1)
one.begin(PROGRAMS[1], 6)
one.at(2, 1)
print(flush=True)
time.sleep(60)
"""


PROGRAMS = programs(generate("1f1b", Shape(devices=2, microbatches=4)))


def recorder(folder: Path, device: int) -> FlightRecorder:
    """The recorder of a device of this process."""
    return FlightRecorder(folder / "flight", device, device, f"stage {device}", os.getpid())


def test_a_killed_process_leaves_its_place(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    os.kill(child.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while (place := read_places(tmp_path / "flight", {1: child.pid})[0]).process == "" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert place.process == "is stopped"
    child.kill()
    child.wait()
    child.stdout.close()
    (place,) = read_places(tmp_path / "flight", {0: 1, 1: child.pid})
    assert (place.process, place.step, place.task, place.finished) == ("is gone", 7, "1F1", "1BW0")
    assert (place.peer, place.awaits) == (0, "activation of micro-batch 1, stage 0 -> 1")
    assert read_places(tmp_path / "flight", {1: child.pid + 1}) == []  # what another process has left


def place(device: int, step: int, peer: int = -1, process: str = "", collective: bool = False) -> DevicePlace:
    """A device that waits for ``peer``, or for a collective, or is in a task."""
    awaits = "" if peer < 0 else "message"
    return DevicePlace(device, device, f"stage {device}", step, "0F1", collective, "0F0", awaits, peer, 1.0, process)


@pytest.mark.parametrize(
    ("places", "first"),
    [
        ([place(0, 3, peer=1), place(1, 3, peer=2), place(2, 3)], 2),
        ([place(0, 3, collective=True), place(1, 3, peer=2), place(2, 3)], 2),
        ([place(0, 3), place(1, 4, process="is gone"), place(2, 3, peer=0)], 1),
        ([place(0, 4), place(1, 3)], 1),
        ([place(0, 3, peer=2), place(1, 3, peer=0)], 0),  # of device 2 nothing is known
        ([place(0, 3, collective=True), place(1, 2, collective=True)], 1),
    ],
)
def test_the_first_stuck_task(places: list[DevicePlace], first: int) -> None:
    found = first_stuck(places)
    assert found is not None
    assert found.device == first
    assert stuck_message(places).startswith(f"first stuck: stage {first} · device {first} ")


def test_devices_that_wait_for_one_another() -> None:
    assert stuck_message([place(0, 3, peer=1), place(1, 3, peer=0)]).startswith("all devices wait for one another: ")
    assert stuck_message([]) == ""


def test_a_place_costs_next_to_nothing(tmp_path: Path) -> None:
    one = recorder(tmp_path, 0)
    one.begin(PROGRAMS[0], 0)
    spent = []
    for _ in range(5):
        began = time.process_time()
        for position in range(2000):
            one.at(position % 8)
        spent.append((time.process_time() - began) / 2000)
    assert min(spent) < 2e-5  # 1e-6 s on quiet cores


def test_workers_that_live_read_what_their_node_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process has to start for it, and the node of which none lives is not waited for."""
    one = recorder(tmp_path, 2)
    one.begin(PROGRAMS[1], 3)

    def task(*_: Any) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: "never"))

    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "head"))
    monkeypatch.setattr(ray, "remote", task)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: ([r for r in refs if r != "never"], ["never"]))
    monkeypatch.setattr(ray, "get", lambda ref: ref)
    cancelled: list[str] = []
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    nodes = ["a" * 56, "b" * 56, "b" * 56]
    at = [Location(Peer(rank, node, "cpu", ""), "", 0, os.getpid()) for rank, node in enumerate(nodes)]
    idle = {1: SimpleNamespace(read_left=SimpleNamespace(remote=read_left))}
    places = ask_places(tmp_path, at, {}, idle).told(0.0)
    assert [(place.rank, place.step) for place in places] == [(2, 4)]
    assert cancelled == ["never"]
