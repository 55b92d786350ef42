"""A worker that hangs when all part is ended, and counts as dead, as do all of a node without its raylet; one whose
node is gone is replaced on another.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from raypipe.errors import TransportError
from raypipe.runtime import in_place as module
from raypipe.runtime.in_place import InPlace
from raypipe.runtime.recovery.flight_recorder import AskedPlaces, DevicePlace


class Rays:
    """A Ray of workers, of which ``hangs`` does; ``ends``: when it is killed."""

    def __init__(self, ends: bool, names: tuple[str, ...] = ("lives", "hangs")) -> None:
        self.ends, self.killed = ends, list[str]()
        self.actors = [SimpleNamespace(name=name, part=SimpleNamespace(remote=partial(str, name))) for name in names]

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.name)

    def wait(self, refs: list[str], timeout: float) -> tuple[list[str], list[str]]:
        there = [ref for ref in refs if ref != "hangs" or (self.ends and self.killed)][:1]
        return there, [ref for ref in refs if ref not in there]

    def get(self, ref: str) -> str:
        if ref == "hangs":
            raise RayActorError()
        return "standing"


NONE: Any = SimpleNamespace(lost=lambda _: None)
"""No copies."""


def at(*nodes: str) -> list[Any]:
    """Return where workers on these nodes are."""
    return [SimpleNamespace(peer=SimpleNamespace(node=node)) for node in nodes]


@pytest.mark.parametrize("ends", [True, False])
def test_it_counts_as_dead(ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rays = Rays(ends)
    monkeypatch.setattr(module, "ray", rays)
    monkeypatch.setattr(module, "ask_places", lambda *_: AskedPlaces([], []))
    job: Any = SimpleNamespace(train=SimpleNamespace(message_timeout_s=0.01))
    group = {"actors": rays.actors, "titles": ["stage 0", "stage 1"], "locations": at("first", "second")}
    workers: Any = SimpleNamespace(**group, unreachable=set, apart={})
    monkeypatch.setattr(module, "gone", lambda _: set())
    recovery = InPlace(job, tmp_path, True, NONE)
    if not ends:
        monkeypatch.setattr(module, "ENDED_S", 0.1)
        with pytest.raises(TransportError, match="stage 1: hangs, and its process does not end"):
            recovery._part(workers)
        return
    standings, dead, hung = recovery._part(workers)
    assert (standings, list(dead), hung, rays.killed) == ({0: "standing"}, [1], "stage 1", ["hangs"])


def place(seconds: float, process: str) -> DevicePlace:
    """Return the place of rank 1, which has been in the same task for ``seconds``."""
    return DevicePlace(1, 1, "stage 1", 4, "1F0", False, "", "", -1, seconds, process)


@pytest.mark.parametrize("seconds", [61.0, 59.99])
def test_one_that_is_stopped_is_not_given_the_timeout_again(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the rest of it, in which a process that was paused may go on; here it does not."""
    rays, looks = Rays(True), list[float]()

    def ask_places(*_: Any) -> AskedPlaces:
        looks.append(time.monotonic())
        return AskedPlaces([place(seconds + looks[-1] - looks[0], "is stopped")], [])

    monkeypatch.setattr(module, "ray", rays)
    monkeypatch.setattr(module, "STOPPED_S", 0.0)
    monkeypatch.setattr(module, "ask_places", ask_places)
    monkeypatch.setattr(module, "gone", lambda _: set())
    job: Any = SimpleNamespace(train=SimpleNamespace(message_timeout_s=60.0))
    group = {"actors": rays.actors, "titles": ["stage 0", "stage 1"], "locations": at("first", "second")}
    workers: Any = SimpleNamespace(**group, unreachable=set, apart={})
    standings, dead, hung = InPlace(job, tmp_path, True, NONE)._part(workers)
    assert (standings, list(dead), rays.killed) == ({0: "standing"}, [1], ["hangs"])
    assert hung.startswith("first stuck: stage 1 · device 1 is in 1F0 of step 4")
    assert len(looks) == (1 if seconds >= 60.0 else 2)


def test_one_that_runs_has_all_of_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rays = Rays(True)
    monkeypatch.setattr(module, "ray", rays)
    monkeypatch.setattr(module, "STOPPED_S", 0.0)
    monkeypatch.setattr(module, "ask_places", lambda *_: AskedPlaces([place(61.0, "")], []))
    monkeypatch.setattr(module, "gone", lambda _: set())
    job: Any = SimpleNamespace(train=SimpleNamespace(message_timeout_s=0.2))
    group = {"actors": rays.actors, "titles": ["stage 0", "stage 1"], "locations": at("first", "second")}
    workers: Any = SimpleNamespace(**group, unreachable=set, apart={})
    began = time.monotonic()
    assert list(InPlace(job, tmp_path, True, NONE)._part(workers)[1]) == [1]
    assert time.monotonic() >= began + 0.2


def test_all_of_a_node_without_its_raylet_are_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that has answered, which Ray ends in a moment; and nobody waits for the keeper there."""
    rays, lost = Rays(True, ("lives", "hangs", "beside")), list[str]()
    monkeypatch.setattr(module, "ray", rays)
    monkeypatch.setattr(module, "gone", lambda nodes: nodes & {"second"})
    job: Any = SimpleNamespace(train=SimpleNamespace(message_timeout_s=60.0))
    nodes = at("first", "second", "second")
    group = {"actors": rays.actors, "titles": ["stage 0", "stage 1", "stage 2"], "locations": nodes}
    workers: Any = SimpleNamespace(**group, unreachable=lambda: {1})
    copies: Any = SimpleNamespace(lost=lost.append)
    standings, dead, hung = InPlace(job, tmp_path, False, copies)._part(workers)
    assert (standings, sorted(dead), hung) == ({0: "standing"}, [1, 2], "")
    assert (set(rays.killed), set(lost)) == ({"hangs", "beside"}, {"second"})


def test_one_that_is_unreachable_may_take_longer_than_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray says that it is dead when it gives up its node; nobody is told that it hung."""
    rays, began = Rays(False), time.monotonic()
    told = rays.wait

    def wait(refs: list[str], timeout: float) -> tuple[list[str], list[str]]:
        rays.ends = time.monotonic() > began + 0.2
        return told(refs, timeout)

    monkeypatch.setattr(rays, "wait", wait)
    monkeypatch.setattr(module, "ray", rays)
    monkeypatch.setattr(module, "gone", lambda _: set())
    monkeypatch.setattr(module, "ask_places", lambda *_: AskedPlaces([], []))
    job: Any = SimpleNamespace(train=SimpleNamespace(message_timeout_s=0.01))
    group = {"actors": rays.actors, "titles": ["stage 0", "stage 1"], "locations": at("first", "second")}
    workers: Any = SimpleNamespace(**group, unreachable=lambda: {1}, apart={})
    standings, dead, hung = InPlace(job, tmp_path, True, NONE)._part(workers)
    assert (standings, list(dead), hung, rays.killed) == ({0: "standing"}, [1], "", ["hangs"])


@pytest.mark.parametrize("elastic", [None, object()], ids=["fixed", "elastic"])
def test_a_replacement_on_another_node(elastic: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has time to find it, and it is checked as all nodes are; an elastic run takes another plan instead."""

    def replaced(_: InPlace, workers: Any, dead: tuple[int, ...]) -> int:
        workers.locations = at("first", "other")
        return 0

    asked: list[Any] = []
    monkeypatch.setattr(InPlace, "_replace", replaced)
    monkeypatch.setattr(module, "gone", lambda nodes: set())
    monkeypatch.setattr(module, "check_hosts", lambda *given: asked.append(given) or {"other": "sees no directory"})
    places = SimpleNamespace(place=SimpleNamespace(is_broken=lambda: True))
    group = {"places": places, "locations": at("first", "lost"), "actors": [], "calls": ["failed"], "elsewhere_s": 0.0}
    workers: Any = SimpleNamespace(**group, apart={})
    job: Any = SimpleNamespace(train=SimpleNamespace(message_timeout_s=1.0, elastic=elastic))
    lost: Any = SimpleNamespace(dead=(1,), marks={})
    recovery, error = InPlace(job, tmp_path, True, NONE), RayActorError()
    if elastic is not None:
        with pytest.raises(RayActorError):
            recovery.replace(workers, lost, 3, error)
        return
    assert recovery.replace(workers, lost, 3, error) == 0
    assert (workers.elsewhere_s, workers.calls) == (module.ELSEWHERE_S, [])
    assert asked == [([], workers.locations, tmp_path, 1.0)]
    assert workers.apart == {"other": "sees no directory"}
