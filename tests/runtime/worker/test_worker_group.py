"""Stage actors: what they are called, and that they leave nothing behind."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.util import list_named_actors

from raypipe.errors import TransportError
from raypipe.runtime.hosts.devices import DeviceRequest
from raypipe.runtime.hosts.reserve import Reservation, reserve
from raypipe.runtime.setup.communicators import Location
from raypipe.runtime.transport.channel import Peer
from raypipe.runtime.worker import worker_group
from raypipe.runtime.worker.worker_group import (
    Places,
    StageStandby,
    WaitingWorkers,
    WorkerGroup,
    device_title,
    start_worker_group,
    titles_of,
)
from raypipe.schedule import Shape, generate
from raypipe.schedule.ir import Schedule
from raypipe.schedule.passes import replicate


def schedule_of(name: str, stages: int, copies: int = 1, **options: int) -> Schedule:
    return replicate(generate(name, Shape(devices=stages, microbatches=2 * stages, **options)), copies)


TITLES = {
    "1f1b": (
        schedule_of("1f1b", 3), 1,
        ["stage 0 · replica 0", "stage 1 · replica 0", "stage 2 · replica 0"],
    ),
    "1f1b, two copies": (
        schedule_of("1f1b", 2, 2), 2,
        ["stage 0 · replica 0", "stage 1 · replica 0", "stage 0 · replica 1", "stage 1 · replica 1"],
    ),
    "one device": (schedule_of("1f1b", 1), 1, ["stage 0 · replica 0"]),
    "interleaved": (
        schedule_of("interleaved-1f1b", 2, chunks=2), 1,
        ["stages 0,2 · replica 0", "stages 1,3 · replica 0"],
    ),
    "chimera": (
        schedule_of("chimera", 2), 1,
        [
            "stage 0 · replica 0 · down + stage 1 · replica 0 · up",
            "stage 1 · replica 0 · down + stage 0 · replica 0 · up",
        ],
    ),
    "chimera, two copies": (
        schedule_of("chimera", 2, 2), 2,
        [
            "stage 0 · replica 0 · down + stage 1 · replica 0 · up",
            "stage 1 · replica 0 · down + stage 0 · replica 0 · up",
            "stage 0 · replica 1 · down + stage 1 · replica 1 · up",
            "stage 1 · replica 1 · down + stage 0 · replica 1 · up",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TITLES)
def test_titles_say_stage_copy_and_direction(case) -> None:
    schedule, copies, titles = TITLES[case]
    assert [device_title(schedule, d, copies) for d in range(schedule.devices)] == titles


def test_four_pipelines_are_half_down_half_up() -> None:
    schedule = schedule_of("chimera", 4, pipelines=4)
    for device in range(4):
        title = device_title(schedule, device, 1)
        assert title.count("down") == 2
        assert title.count("up") == 2


@pytest.mark.runs
def test_a_fleet_comes_up_under_its_names_and_goes_away(local_ray) -> None:
    schedule = schedule_of("1f1b", 2)
    workers = start_worker_group(titles_of(schedule, 1, 1), reserve(2, DeviceRequest(cpus=1.0, gpus=0.0), 60.0))
    stopped = False
    try:
        assert workers.titles == ["stage 0 · replica 0", "stage 1 · replica 0"]
        names = {f"{title} · device {rank} · {workers.run_id}" for rank, title in enumerate(workers.titles)}
        assert names <= set(list_named_actors())
        assert [at.peer.rank for at in workers.locations] == [0, 1]
        assert [at.peer.name for at in workers.locations] == workers.titles
        assert len({at.pid for at in workers.locations}) == 2
        for at in workers.locations:  # what `ps` and `kill` find
            assert Path(f"/proc/{at.pid}/cmdline").read_text().startswith("ray::Stage")
        assert all(rss > 10 << 20 for rss in ray.get(workers.call("memory_bytes")))
        workers.stop()
        stopped = True
        assert not names & set(list_named_actors())
        for actor in workers.actors:
            with pytest.raises(ray.exceptions.RayActorError):
                ray.get(actor.clock.remote(), timeout=30)
        _wait_until_gone([at.pid for at in workers.locations])
    finally:
        if not stopped:
            workers.stop()


class SecondFails:
    """An actor, of which the second one does not come up."""

    def __init__(self, rank: int, title: str) -> None:
        if rank == 1:
            raise ValueError("no")

    def locate(self) -> None:
        pass


@pytest.mark.runs
def test_actors_of_which_one_does_not_come_up_are_all_gone(local_ray) -> None:
    place = reserve(2, DeviceRequest(cpus=0.01, gpus=0.0), 60.0)
    with pytest.raises(ray.exceptions.RayActorError):
        start_worker_group(["sound one", "broken one"], place, SecondFails)
    assert not [name for name in list_named_actors() if name.startswith(("sound one", "broken one"))]
    groups = ray.util.placement_group_table().values()
    assert all(group["state"] == "REMOVED" for group in groups if group["name"].startswith("raypipe "))


@pytest.mark.runs
def test_a_worker_whose_node_is_gone_is_not_waited_for(local_ray, monkeypatch) -> None:
    group = start_worker_group(["here", "away"], reserve(2, DeviceRequest(cpus=0.01, gpus=0.0), 60.0), Sound)
    monkeypatch.setattr(Reservation, "is_broken", lambda self: True)
    try:
        group.locate()  # all are there, so whether a node is gone does not matter
        group.actors[1] = ray.remote(Sound).options(resources={"of a lost node": 1}).remote(1, "away")
        with pytest.raises(TransportError, match="away: its node, or another of the run's, is gone"):
            group.locate()
    finally:
        group.stop()


class Sound:
    """An actor that comes up."""

    def __init__(self, rank: int, title: str) -> None:
        pass

    def locate(self) -> None:
        pass


@pytest.mark.parametrize("elsewhere_s", [0.0, 60.0])
def test_ray_has_time_to_find_other_devices(elsewhere_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([([], ["late"]), ([], ["late"]), (["late"], [])])
    monkeypatch.setattr(worker_group.ray, "wait", lambda *_, **__: next(answers))
    monkeypatch.setattr(worker_group.ray, "get", list)
    actor = SimpleNamespace(locate=SimpleNamespace(remote=lambda: "late"))
    places: Any = SimpleNamespace(place=SimpleNamespace(is_broken=lambda: True))
    group = WorkerGroup([actor], ["elsewhere"], [], "run", places=places, elsewhere_s=elsewhere_s)
    if elsewhere_s:
        group.locate()
        assert group.locations == ["late"]
    else:
        with pytest.raises(TransportError, match="is gone"):
            group.locate()


def _wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(_is_stage(pid) for pid in pids):
        assert time.monotonic() < deadline, "a stopped stage actor lives on"
        time.sleep(0.05)


def _is_stage(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().startswith("ray::Stage")
    except OSError:
        return False


@pytest.mark.parametrize(("gpus", "hidden"), [(0.0, True), (1.0, False)])
def test_a_worker_that_is_given_no_gpu_sees_none(gpus: float, hidden: bool) -> None:
    """Ray 2.60 leaves a process that reserves no GPU every GPU of its node."""
    place: Any = SimpleNamespace(request=DeviceRequest(1.0, gpus), strategy=lambda bundle: None, held=True)
    variables = Places(place, [0], StageStandby).options(0, "stage 0")["runtime_env"].get("env_vars", {})
    assert (variables.get("CUDA_VISIBLE_DEVICES") == "") == hidden


@pytest.mark.parametrize(("device", "waiting"), [("cpu", 2), ("cuda:GPU-1", 0)])
def test_processes_without_a_device_wait_for_workers_on_cpus_only(device, waiting, monkeypatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(WaitingWorkers, "_start", lambda self, node: started.append(node))
    locations = [Location(Peer(0, "node", device, "stage 0"), "10.0.0.1", 4000, 1)]
    places: Any = SimpleNamespace()
    WaitingWorkers().stand_by(WorkerGroup([], [], locations, "run", None, places), 2)
    assert started == ["node"] * waiting


class Ends:
    def work(self, ends: bool = False) -> None:
        if ends:
            os._exit(1)


@pytest.mark.runs
def test_the_ranks_of_which_a_call_was_lost_are_known(local_ray: None) -> None:
    actors = [ray.remote(Ends).options(num_cpus=0).remote() for _ in range(3)]
    workers = WorkerGroup(actors, ["a", "b", "c"], [], "run")
    assert workers.unreachable() == set()
    ray.get(workers.call("work"))
    ray.wait(workers.call_each("work", [(False,), (True,), (False,)]), num_returns=3, timeout=30)
    assert workers.unreachable() == {1}
