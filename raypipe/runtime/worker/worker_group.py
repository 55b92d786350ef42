"""A worker group: one actor per rank on reserved devices, named by what it runs; and processes that wait to be workers.

Those take the place of one that dies, or run on more devices. They have imported torch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util import list_named_actors

from raypipe.cost.hosts import Numbering
from raypipe.errors import RaypipeError, TransportError
from raypipe.runtime.hosts.devices import NO_GPUS
from raypipe.runtime.hosts.reserve import NAMESPACE, Kept, Notify, Place, Reservation, silent
from raypipe.runtime.process.set_up import first_backward
from raypipe.runtime.recovery.failure import shows_loss
from raypipe.runtime.setup.communicators import Location, first_ranks
from raypipe.runtime.update.optimizer import untraced
from raypipe.runtime.worker.worker import StageWorker
from raypipe.schedule.ir import Schedule

START_S = 120.0
"""Time that the worker processes have to start, once their devices are reserved."""
LOOK_S = 1.0
"""Interval at which a group that waits for its workers looks at their nodes, or at the calls behind that one."""
LEAVE_S = 5.0
"""Time that workers have to leave what they are in, before they are ended."""
CALLS = 64
"""Number of newest calls per worker whose references a group keeps, to find the cause of a failure among them. It is
more than are ever queued, and few enough that a long run does not keep all results alive."""
NEWEST = 8
"""Those per worker among which the cause is looked for while others live."""


@dataclass(frozen=True, slots=True)
class Places:
    """The bundles that workers are started in."""

    place: Reservation
    bundles: list[int]
    """Per rank, the bundle of its device."""
    actor_class: type

    def start(self, rank: int, title: str, again: int = 0) -> Any:
        """Start the worker of a rank; ``again`` counts those that had this place before in the same attempt."""
        number = f".{again}" if again else ""
        options = self.options(rank, f"{title} · device {rank} · {self.place.run_id}{number}")
        return ray.remote(self.actor_class).options(**options).remote(rank, title)

    def options(self, rank: int, name: str) -> dict[str, Any]:
        """Return the options of an actor called ``name`` that runs on a rank's device.

        Ray ends an actor with the process that created it, unless it is detached. Those of an attempt are, on CPUs:
        they outlive a driver that dies and serve the next one, and end with the reservation, as whatever runs in a
        placement group does. Ray takes that away when the process that starts the run gives it back or dies.
        """
        request = self.place.request
        # One compute thread per device, because the host's cores are shared by several devices.
        environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **NO_GPUS} if request.gpus == 0 else {}
        return {
            "name": name,
            "scheduling_strategy": self.place.strategy(self.bundles[rank]),
            "num_cpus": request.cpus,
            "num_gpus": request.gpus,
            "runtime_env": {"env_vars": environment} if environment else {},
            "max_restarts": 0,
            **({"lifetime": "detached", "namespace": NAMESPACE} if self.place.held and request.gpus == 0 else {}),
        }

    def warm(self, rank: int, name: str, **resources: float) -> tuple[Any, Any]:
        """Start a process that waits to be a worker beside that of a rank, and the reference that is ready with it."""
        actor = ray.remote(StageStandby).options(**{**self.options(rank, name), **resources}).remote()
        return actor, actor.warm.remote()

    def of_ranks(self) -> list[tuple[Place, int]]:
        """Return each rank's bundle, and its number among the bundle's ranks."""
        places, together = self.place.places(), self.place.together
        return [(places[bundle], rank % together) for rank, bundle in enumerate(self.bundles)]


class WaitingWorkers:
    """Processes that wait to be workers: in bundles, as an attempt leaves them for the next one, and beside workers.

    The latter (``train.standby``) reserve nothing. They wait on the nodes of a run's devices, and for each that is
    taken another one is started.
    """

    def __init__(self, actors: Kept | None = None) -> None:
        self.actors: Kept = {} if actors is None else actors
        """Those in bundles."""
        self._places: Places | None = None
        """Where the others are started; None until they ``stand_by``."""
        self._ranks: dict[str, int] = {}
        self._beside: list[tuple[str, Any, Any]] = []
        """Node, actor, and the reference that is ready when it is warm."""
        self._started = 0

    def stand_by(self, workers: WorkerGroup, count: int) -> None:
        """Start ``count`` processes beside the workers of a group, unless this was done before."""
        # A process that reserves nothing may not use a GPU, and so cannot take the place of a worker that has one.
        if self._places is None and workers.places is not None and workers.on_cpus():
            self._places, self._ranks = workers.places, first_ranks(workers.locations)
            for node in islice(cycle(self._ranks), count):
                self._start(node)

    def _start(self, node: str) -> None:
        assert self._places is not None
        name = f"standby {self._started} · {self._places.place.run_id}"
        self._started += 1
        self._beside.append((node, *self._places.warm(self._ranks[node], name, num_cpus=0, num_gpus=0)))

    def take(self, node: str) -> Any | None:
        """Return a process that stands by on a node, or is on its way, and start another one; None if there is none."""
        here = [one for one in self._beside if one[0] == node]
        ready = {warm for _, _, warm in here if ray.wait([warm], timeout=0)[0]}
        for one in sorted(here, key=lambda one: one[2] not in ready):
            _, actor, warm = one
            self._beside.remove(one)
            self._start(node)
            try:
                if warm in ready:
                    ray.get(warm)
            except ray.exceptions.RayError:
                continue  # it has died meanwhile
            return actor
        return None

    def end(self) -> None:
        """End them all."""
        for actor in self.actors.values():
            ray.kill(actor)
        self.actors.clear()
        self.end_beside()

    def end_beside(self) -> None:
        """End those that stand by."""
        for _, actor, _ in self._beside:
            ray.kill(actor)
        self._beside.clear()
        self._places = None


@dataclass(slots=True)
class WorkerGroup:
    """The running workers of one attempt, by rank."""

    actors: list[Any]
    titles: list[str]
    locations: list[Location]
    run_id: str
    reservation: Reservation | None = None
    """The devices, which are released when the workers stop unless they are ``held``; None if nobody knows."""
    places: Places | None = None
    """Where a worker that dies can be started again; None if nobody knows."""
    elsewhere_s: float = 0.0
    """Time that Ray has to find devices for those of a lost node."""
    process_groups: int = 0
    """Process groups that the newest set-up made."""
    apart: dict[str, str] = field(default_factory=dict)
    """By node, why it cannot use the run's directory (``host_check``)."""
    samples: Any = None
    """The actor that streams samples to the workers; None where they read files."""
    waiting: WaitingWorkers = field(default_factory=WaitingWorkers)
    """Processes that wait to take the place of one that dies."""
    calls: deque[Any] = field(init=False)
    """References of the newest calls, of each one those of all ranks in their order."""

    def __post_init__(self) -> None:
        self.calls = deque(maxlen=CALLS * max(1, len(self.actors)))

    def call(self, method: str, *args: object) -> list[Any]:
        """Queue one call on every actor, in rank order; return the references."""
        return self.call_each(method, [args] * len(self.actors))

    def call_each(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        """Queue one call on every actor with arguments of its own, in rank order; return the references."""
        refs = [getattr(actor, method).remote(*args) for actor, args in zip(self.actors, arguments, strict=True)]
        self.calls.extend(refs)
        return refs

    def answers(self, refs: Sequence[Any], timeout_s: float) -> list[Any]:
        """Wait for the results of calls, each one of all ranks in their order.

        A process that is stopped before it has answered raises nothing. Others may have answered, and wait for it in a
        call that is queued behind this one; or nobody waits for it, as this is the last one.

        Args:
            refs: the calls' references.
            timeout_s: how long a device may take after the last one that has answered.

        Raises:
            TransportError: one takes longer.
            ray.exceptions.RayError: what a worker raised, or that one is lost, as a later call says.
        """
        answered, since = 0, time.monotonic()
        while True:
            try:
                return list(ray.get(list(refs), timeout=LOOK_S))
            except GetTimeoutError as error:
                if isinstance(error, RayTaskError):  # a worker raised it
                    raise
            calls = list(self.calls)
            behind = calls[calls.index(refs[-1]) + 1 :] if refs[-1] in calls else []
            for ref in ray.wait(behind, num_returns=len(behind), timeout=0)[0] if behind else []:
                try:
                    ray.get(ref)
                except (RayError, RaypipeError) as error:
                    if shows_loss(error):  # else it is that call's own
                        raise
            done, missing = ray.wait(list(refs), num_returns=len(refs), timeout=0)
            if len(done) > answered:
                answered, since = len(done), time.monotonic()
            elif answered and missing and time.monotonic() > since + timeout_s:
                raise TransportError(
                    self.titles[refs.index(missing[0]) % len(self.actors)],
                    f"{len(done)} of {len(refs)} answers have come, and no more within {timeout_s:g} s",
                    "look at that device: it may be stuck, or its tasks may take longer than the message timeout",
                )

    def newest_calls(self) -> list[Any]:
        """Return the references of the calls among which the cause of a failure is looked for."""
        return list(self.calls)[-NEWEST * len(self.actors) :]

    def unreachable(self) -> set[int]:
        """Return the ranks of which a call has failed since their process, or the way to it, is gone.

        Ray says that an actor is dead when the raylet of its node does; where that is gone too, some 15 s later.
        """
        ranks = dict(zip(self.newest_calls(), cycle(range(len(self.actors))), strict=False))
        ended = ray.wait([*ranks], num_returns=len(ranks), timeout=0, fetch_local=False)[0] if ranks else []
        result = set()
        for ref in ended:
            try:
                ray.get(ref)
            except ray.exceptions.RayActorError:
                result.add(ranks[ref])
            except ray.exceptions.RayError:
                pass
        return result

    def processes(self) -> list[Any]:
        """Return the actors that are processes of their own, with which all workers end."""
        return self.actors

    def locate(self) -> None:
        """Wait until all workers have started, and note where they are.

        Raises:
            TransportError: some did not start within ``START_S``, or the node of one is gone and there are no devices
                elsewhere; the run may try again.
        """
        where = late = self.call("locate")
        whole = time.monotonic()
        deadline = whole + START_S
        while late and time.monotonic() < deadline:
            _, late = ray.wait(where, num_returns=len(where), timeout=LOOK_S)
            if not late or self.places is None or not self.places.place.is_broken():
                whole = time.monotonic()
            elif time.monotonic() >= whole + self.elsewhere_s:
                first = self._first_of(where, late)
                raise TransportError(first, "its node, or another of the run's, is gone", "bring it back, or resume")
        if late:
            raise TransportError(
                self._first_of(where, late),
                f"{len(late)} of {len(where)} workers, this one first, did not start within {START_S:g} s",
                "see whether its node is overloaded or out of memory, and Ray's logs there",
            )
        self.locations[:] = ray.get(where)

    def _first_of(self, asked: Sequence[Any], late: Sequence[Any]) -> str:
        return next(title for title, ref in zip(self.titles, asked, strict=True) if ref in late)

    def leaders_apart(self) -> dict[str, Any]:
        """Return the first actor on each node that cannot use the run's directory, by Ray's id of the node."""
        first = first_ranks(self.locations)
        return {node: self.actors[first[node]] for node in self.apart}

    def stop(self) -> None:
        """Kill all actors, and release their devices unless the run holds them for its next attempt."""
        for actor in self.processes():
            ray.kill(actor)
        self.waiting.end_beside()
        if self.reservation is not None and not self.reservation.held:
            self.reservation.give_back()

    def by_place(self) -> Kept:
        """Return the actors by where they run, for another group on the same devices."""
        assert self.places is not None
        return dict(zip(self.places.of_ranks(), self.actors, strict=True))

    def on_cpus(self) -> bool:
        """Return whether no worker has a GPU, whose collectives may hang when a peer is gone."""
        return all(at.peer.device == "cpu" for at in self.locations)

    def leave(self) -> None:
        """Have all workers leave their plan and wait; processes that stand by wait in the place of those that do not.

        Workers that do not leave in time are ended. The group has none of them any more.
        """
        kept = those_that_leave(self.by_place())
        assert self.places is not None
        for at, where in zip(self.locations, self.places.of_ranks(), strict=True):
            if where not in kept and (other := self.waiting.take(at.peer.node)) is not None:
                kept[where] = other
        self.waiting.actors.update(kept)


def those_that_leave(actors: Kept, others: Iterable[Any] = (), most: int | None = None) -> Kept:
    """Have workers leave their plan; return those that did, by where they run. All others are ended.

    Args:
        actors: by where they run.
        others: who know that themselves (``Setup.place``), unless they have not been set up yet.
        most: number of places there are; when all have a worker, nobody is waited for any more.
    """
    asked = {actor.leave.remote(): (where, actor) for where, actor in actors.items()}
    asked |= {actor.leave.remote(): (None, actor) for actor in {*others}.difference(actors.values())}
    result: Kept = {}
    deadline = time.monotonic() + LEAVE_S
    while asked and len(result) != most:
        ready, _ = ray.wait(list(asked), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        where, actor = asked.pop(ready[0])
        with suppress(ray.exceptions.RayError):  # it has died, or cannot leave
            told = ray.get(ready[0])
            if (at := where or told) is not None and at not in result:
                result[at] = actor
                continue
        ray.kill(actor)
    for _, actor in asked.values():
        ray.kill(actor)
    return result


def device_title(schedule: Schedule, device: int, copies: int) -> str:
    """Return a device's name in the dashboard and in errors: its stages, data-parallel copy and direction.

    A device with several stage replicas names them all: ``stage 0 · replica 0 · down + stage 3 · replica 0 · up``.
    """
    per_copy = schedule.replicas // copies
    parts = []
    for replica, devices in enumerate(schedule.placement):
        stages = [str(s) for s, d in enumerate(devices) if d == device]
        if stages:
            noun = "stage" if len(stages) == 1 else "stages"
            direction = "" if per_copy == 1 else " · down" if replica % per_copy < per_copy // 2 else " · up"
            parts.append(f"{noun} {','.join(stages)} · replica {replica // per_copy}{direction}")
    return " + ".join(parts)


def titles_of(schedule: Schedule, copies: int, tensor: int) -> list[str]:
    """Return the names of a schedule's workers, by rank; ``tensor``: how many a device has."""
    return [
        device_title(schedule, d, copies) + (f" · tensor {m}" if tensor > 1 else "")
        for d in range(schedule.devices)
        for m in range(tensor)
    ]


def start_beside(titles: list[str], place: Reservation, numbering: Numbering | None) -> Kept:
    """Start the workers of a run's first attempt, whose driver is another process and may be on its way.

    These end with the one that starts the run, so that they outlive a driver, and Ray Train's controller. The arguments
    are those of ``start_worker_group``.
    """
    places = Places(place, place.in_rank_order(numbering), StageWorker)
    return {at: places.start(rank, titles[rank]) for rank, at in enumerate(places.of_ranks())}


def start_worker_group(
    titles: list[str],
    place: Reservation,
    actor_class: type = StageWorker,
    timeout_s: float | None = 120.0,
    notify: Notify = silent,
    waiting: WaitingWorkers | None = None,
    numbering: Numbering | None = None,
) -> WorkerGroup:
    """Start ``actor_class(rank, title)`` on reserved devices, in the order of ``rank_order``.

    Args:
        titles: one name per actor (``titles_of`` a schedule).
        place: the devices.
        actor_class: the class of all actors.
        timeout_s: seconds to wait for devices that Ray has to find anew, as one of their nodes was lost; None for ever.
        notify: called with a sentence now and then while the devices are not free.
        waiting: those that become workers where they are; others in bundles of no device of the new group are ended.
        numbering: which of the devices, host by host, each rank gets; by default in their order.

    Raises:
        DevicesError: the devices were not free within ``timeout_s``.
    """
    place.wait(timeout_s, notify)
    places = Places(place, place.in_rank_order(numbering), actor_class)
    waiting = waiting or WaitingWorkers()
    actors = _serving_on(places, waiting.actors, titles)
    for rank, title in enumerate(titles):
        if rank not in actors:
            actors[rank] = places.start(rank, title)
    workers = WorkerGroup([actors[rank] for rank in range(len(titles))], titles, [], place.run_id, place, places)
    try:
        workers.locate()
    except BaseException:
        workers.stop()  # the caller has no group yet that it could stop
        raise
    workers.waiting = waiting
    return workers


def _serving_on(places: Places, kept: Kept, titles: Sequence[str]) -> dict[int, Any]:
    """Give ranks to kept actors, and end those that have no place; return the former by rank."""
    result = {}
    for rank, (at, title) in enumerate(zip(places.of_ranks(), titles, strict=True)):
        if (actor := kept.pop(at, None)) is not None:
            actor.become.remote(rank, title)
            result[rank] = actor
    for actor in kept.values():
        ray.kill(actor)
    kept.clear()
    return result


class StageStandby(StageWorker):
    """A worker without a rank; its process title begins as those of others do (``ray::Stage``).

    It keeps the low priority with which Ray starts processes until it ``become``s one.
    """

    def __init__(self) -> None:
        self.title = "standby"
        self.apart, self.broken, self.parted = False, False, None

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
        started = [places.warm(rank, _name(*at, reservation.run_id)) for rank, at in enumerate(places.of_ranks())]
        self._actors, self._warm = [actor for actor, _ in started], [warm for _, warm in started]

    def ready(self) -> bool:
        """Return whether all are warm, or cannot become so."""
        return not ray.wait(self._warm, num_returns=len(self._warm), timeout=0)[1]


def warm_ones(reservation: Reservation) -> Kept:
    """Return the processes that ``Warm`` has started on devices of a reservation, and that nobody has taken yet."""
    names = {*list_named_actors()}
    result: Kept = {}
    for place in reservation.places():
        for number in range(reservation.together):
            name = _name(place, number, reservation.run_id)
            if name in names:
                with suppress(ValueError):  # it has ended meanwhile
                    result[place, number] = ray.get_actor(name)
    return result


def _name(place: Place, number: int, run_id: str) -> str:
    return f"waits for a plan {run_id} · {place.part} · bundle {place.number}.{number}"
