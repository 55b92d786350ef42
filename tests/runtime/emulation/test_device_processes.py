"""The processes of emulated devices: what they answer, and that none outlives whoever started them."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from raypipe.errors import RunError
from raypipe.runtime.emulation.device_processes import DeviceProcesses
from raypipe.runtime.setup.communicators import Location

WORKERS = [(0, "stage 0", "node a", "127.0.0.1"), (1, "stage 1", "node a", "127.0.0.1")]
WAIT_S = 60.0


def called(processes: DeviceProcesses, device: int, method: str, *arguments: object) -> object:
    """What the caller gets after it has come through Ray."""
    return pickle.loads(pickle.dumps(processes.start(device, pickle.dumps((method, arguments))).result()))


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def comes(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


@pytest.fixture
def processes():
    made = DeviceProcesses(WORKERS)
    yield made
    made._forking.kill()
    made._forking.communicate()


@pytest.mark.slow
def test_each_device_is_a_process_of_its_own(processes) -> None:
    result = [called(processes, device, "locate") for device in (1, 0)]
    assert all(isinstance(one, Location) for one in result)
    assert [(one.peer.rank, one.peer.name, one.peer.node, one.address) for one in result] == [
        (1, "stage 1", "node a", "127.0.0.1"), (0, "stage 0", "node a", "127.0.0.1")
    ]  # fmt: skip
    assert len({one.pid for one in result} | {os.getpid(), processes._forking.pid}) == 4
    assert len({one.port for one in result}) == 2


@pytest.mark.slow
def test_what_a_worker_raises_comes_back(processes) -> None:
    with pytest.raises(AssertionError, match="set up first"):
        called(processes, 0, "run_step", 0, (True, True))
    with pytest.raises(AttributeError, match="no_such"):
        called(processes, 0, "no_such")
    assert isinstance(called(processes, 0, "locate"), Location)


@pytest.mark.slow
def test_calls_begin_in_the_order_of_their_turns(processes, monkeypatch) -> None:
    """Ray may begin an actor's calls in another order than that in which they were made."""
    begun: list[int] = []
    start = processes.start

    def noted(device: int, request: bytes) -> object:
        begun.append(device)
        return start(device, request)

    monkeypatch.setattr(processes, "start", noted)
    locate = pickle.dumps(("locate", ()))

    async def swapped() -> list[object]:
        both, one = processes.calls(1, [(1, locate), (0, locate)]), processes.calls(0, [(0, locate)])
        return await asyncio.gather(both, one)

    both, one = pickle.loads(pickle.dumps(asyncio.run(swapped())))
    assert begun == [0, 1, 0]
    assert [place.peer.rank for place in both] == [1, 0]
    assert one.peer.rank == 0


@pytest.mark.slow
def test_a_killed_device_is_named(processes) -> None:
    victim = called(processes, 1, "locate")
    os.kill(victim.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RunError, match="stage 1: its process has ended"):
            called(processes, 1, "locate")
    assert isinstance(called(processes, 0, "locate"), Location)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["actor", "forking process"])
def test_no_process_outlives_the_one_that_started_it(victim) -> None:
    code = (
        "import pickle, time; from raypipe.runtime.emulation.device_processes import DeviceProcesses; "
        f"d = DeviceProcesses({WORKERS!r}); "
        "found = [pickle.loads(d.start(i, pickle.dumps(('locate', ()))).result().data) for i in (0, 1)]; "
        "print(d._forking.pid, *(one.pid for one in found), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout is not None
        forking, *devices = map(int, actor.stdout.readline().split())
        try:
            os.kill(actor.pid if victim == "actor" else forking, signal.SIGKILL)
            assert comes(lambda: all(map(gone, (forking, *devices))))
        finally:
            for pid in (actor.pid, forking, *devices):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_an_actor_that_starts_devices_imports_no_torch() -> None:
    code = "import sys, raypipe.runtime.emulation.device_processes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
