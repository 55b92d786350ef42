"""Processes that wait to be workers: in place of one that dies, or on more devices. They have imported torch."""

from __future__ import annotations

from contextlib import suppress
from itertools import cycle, islice
from typing import Any

import ray
import torch
from ray.util import list_named_actors

from raypipe.runtime.group.worker_group import Places, WorkerGroup
from raypipe.runtime.hosts.reserve import Kept, Place, Reservation
from raypipe.runtime.process.set_up import first_backward
from raypipe.runtime.update.optimizer import untraced
from raypipe.runtime.worker.worker import StageWorker


class StageStandby(StageWorker):
    """A worker without a rank; its process title begins as those of others do (``ray::Stage``).

    It keeps the low priority with which Ray starts processes until it ``become``s one.
    """

    def __init__(self) -> None:
        self.title = "standby"
        self.apart, self.parted = False, None

    def warm(self) -> str:
        """Do what is slow for the first time; return the node."""
        first_backward()
        layer = torch.nn.Linear(4, 4)
        layer(torch.ones(2, 4)).sum().backward()
        untraced(torch.optim.AdamW)(layer.parameters(), fused=True).step()
        return str(ray.get_runtime_context().get_node_id())

    def become(self, rank: int, title: str) -> None:
        """Be the worker of a rank from now on."""
        StageWorker.__init__(self, rank, title)


class Warm:
    """Processes that wait for another plan of an elastic run, on devices that are reserved for it already."""

    def __init__(self, reservation: Reservation, among: Reservation) -> None:
        """Start one on each device of ``reservation`` that ``among`` does not have."""
        self.reservation = reservation
        known = {*among.places()}
        bundles = [number for number, place in enumerate(reservation.places()) if place not in known]
        ranks = [bundle for bundle in bundles for _ in range(reservation.together)]
        places = Places(reservation, ranks, StageStandby)
        self._actors = [
            ray.remote(StageStandby).options(**places.options(rank, _name(*at, reservation.run_id))).remote()
            for rank, at in enumerate(places.of_ranks())
        ]
        self._warm = [actor.warm.remote() for actor in self._actors]

    def ready(self) -> bool:
        """Return whether all are warm, or cannot become so."""
        return not ray.wait(self._warm, num_returns=len(self._warm), timeout=0)[1]

    def stop(self) -> None:
        """End all of them."""
        for actor in self._actors:
            ray.kill(actor)


def warm_ones(reservation: Reservation) -> Kept:
    """Return the processes that ``Warm`` has started on devices of a reservation, and that nobody has taken yet."""
    names = {*list_named_actors()}
    found: Kept = {}
    for place in reservation.places():
        for number in range(reservation.together):
            name = _name(place, number, reservation.run_id)
            if name in names:
                with suppress(ValueError):  # it has ended meanwhile
                    found[place, number] = ray.get_actor(name)
    return found


def _name(place: Place, number: int, run_id: str) -> str:
    return f"waits for a plan {run_id} · {place.part} · bundle {place.number}.{number}"


class StandbyPool:
    """Keeps ``count`` processes waiting on the nodes of a run's devices, which they reserve nothing of."""

    def __init__(self, workers: WorkerGroup, count: int) -> None:
        self._places, self._started = workers.places, 0
        self._waiting: list[tuple[str, Any, Any]] = []
        """Node, actor, and the reference that is ready when it is warm."""
        self._ranks = workers.first_ranks()
        for node in islice(cycle(self._ranks), count if workers.places is not None else 0):
            self._start(node)

    def _start(self, node: str) -> None:
        assert self._places is not None
        name = f"standby {self._started} · {self._places.place.run_id}"
        self._started += 1
        options = {**self._places.options(self._ranks[node], name), "num_cpus": 0, "num_gpus": 0}
        actor = ray.remote(StageStandby).options(**options).remote()
        self._waiting.append((node, actor, actor.warm.remote()))

    def take(self, node: str) -> Any | None:
        """Return a process that waits on a node, or is on its way, and start another one; None if none is there."""
        here = [one for one in self._waiting if one[0] == node]
        ready = {warm for _, _, warm in here if ray.wait([warm], timeout=0)[0]}
        for one in sorted(here, key=lambda one: one[2] not in ready):
            _, actor, warm = one
            self._waiting.remove(one)
            self._start(node)
            try:
                if warm in ready:
                    ray.get(warm)
            except ray.exceptions.RayError:
                continue  # it has died meanwhile
            return actor
        return None

    def stop(self) -> None:
        """End all that still wait."""
        for _, actor, _ in self._waiting:
            ray.kill(actor)
        self._waiting.clear()
