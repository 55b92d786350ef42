"""Replace workers that died while all others keep their processes: the driver's side.

The living workers part (``recovery.replacement``), replacements start on the devices of the dead ones, and all join in
new groups under a new name. Their state comes from one of two sources. Where every stage of a device has a twin (a
data-parallel copy, or Chimera's other direction), the twins send theirs to the replacements, the others keep their own,
and the step that was running is finished or repeated. Else all take that of the newest copy in the nodes' memory
(``saving.neighbour_copies``), and the steps since then are repeated.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from raypipe.errors import DeviceError, RaypipeError, TransportError
from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import RunLog
from raypipe.plan.online.better_order import Running
from raypipe.runtime.executor.step import StepResult
from raypipe.runtime.hosts.host_check import check_hosts
from raypipe.runtime.hosts.reserve import gone
from raypipe.runtime.recovery.failure import describe, is_final, own_error, root_cause
from raypipe.runtime.recovery.flight_recorder import (
    STOPPED,
    AskedPlaces,
    ask_places,
    stuck_message,
)
from raypipe.runtime.recovery.replacement import Transfer, transfers
from raypipe.runtime.saving.neighbour_copies import NeighbourCopies
from raypipe.runtime.set_up_workers import setups_of
from raypipe.runtime.update.ledger import Facts, Standing, agreed_steps
from raypipe.runtime.worker.worker_group import WorkerGroup
from raypipe.schedule.sharding import copy_ranks

AT_ONE_STEP = 3
"""Recoveries after the same step, beyond which the run restarts: whatever kills the workers comes with that step."""
ENDED_S = 30.0
"""Time that the process of a device that hangs has to end."""
ELSEWHERE_S = 15.0
"""Time that Ray has to find devices on other nodes for those of a lost one."""
GIVEN_UP_S = 60.0
"""Time that Ray has to give up a node that does not answer: by its settings some 15 to 30 s."""
STOPPED_S = 1.0
"""Time that the living have to answer, before is looked for a process that is stopped."""
LOOK_S = 0.5
"""Interval at which is looked for more that have died, while others answer, and for nodes that are given up."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The outcome of a recovery from twins."""

    done: int
    """Number of steps after which all devices go on."""
    facts: Mapping[int, Facts]
    """By step, counted from 0: what all devices have told of the newest of these steps."""
    from_pool: int
    """Replacements that were waiting already."""
    repeated: int
    """Steps that had begun and are run again."""


@dataclass(frozen=True, slots=True)
class LostWorkers:
    """A death of workers, as it is known when all that live have parted."""

    standings: Mapping[int, Standing]
    """How far the living are, by rank; none where nobody keeps account."""
    dead: tuple[int, ...]
    """Ranks."""
    cause: str
    stuck: str | AskedPlaces
    """Where the devices were (``flight_recorder``); what is asked of those that live is told while others start."""
    began: float
    """When it was noticed, in seconds on this host's clock."""
    marks: dict[str, float] = field(default_factory=dict)
    """When what ended, in order: ``parted`` all that live, ``started`` the replacements."""

    def event(self, workers: WorkerGroup, replaced: int, repeated: int, source: str) -> dict[str, Any]:
        """Return the fields of the event that tells of the recovery, when all devices are ready for the next step.

        Args:
            workers: the group with the replacements.
            replaced: how many of them were waiting already.
            repeated: steps that had begun and are run again.
            source: ``replica``, ``neighbour`` or ``checkpoint``.
        """
        marks = {**self.marks, "joined": time.monotonic()}
        phases = {
            name: at - before for (name, at), before in zip(marks.items(), (self.began, *marks.values()), strict=False)
        }
        return {
            "ranks": list(self.dead),
            "devices": [workers.titles[rank] for rank in self.dead],
            "pids": [workers.locations[rank].pid for rank in self.dead],
            "from_standby": replaced,
            "steps_repeated": repeated,
            "seconds": marks["joined"] - self.began,
            "phases_s": phases,
            "message": self.cause,
            "stuck": self.stuck if isinstance(self.stuck, str) else stuck_message(self.stuck.told(0.0)),
            "source": source,
        }


def _can_replace(job: JobSpec, running: Running, workers: WorkerGroup) -> bool:
    """Return whether a worker that dies can be replaced while the others keep their processes."""
    return (
        job.train.recovery == "in-place"
        and workers.places is not None
        and workers.on_cpus()
        and running.plan.parallel.transport != "ray-collective"  # it joins a world once in the life of a process
    )


def _can_recover(job: JobSpec, running: Running, workers: WorkerGroup) -> bool:
    """Return whether a run replaces a worker that dies, whichever it is, by twins of all its stages."""
    parallel, schedule, ranks = running.plan.parallel, running.schedule, len(workers.actors)
    return (
        _can_replace(job, running, workers)
        and ranks > 1
        and schedule.versions == "flush"
        and schedule.sharding is None
        and not parallel.late_updates  # one layer's update can be final on one device and not on another
        and parallel.tensor == 1  # nobody has tried it with ranks that share their layers
        and all(_moved(running, {rank}) is not None for rank in range(ranks))
    )


def _moved(running: Running, dead: Collection[int]) -> list[Transfer] | None:
    """Return what restores the processes of these ranks; None if a stage, or a share of its experts, is lost."""
    placement, parallel = running.schedule.placement, running.plan.parallel
    shares = copy_ranks(len(placement), parallel.replicas, parallel.experts)
    return transfers(placement, dead, parallel.tensor, shares)


class InPlace:
    """Recovers the workers of one attempt, as often as it takes."""

    def __init__(self, job: JobSpec, directory: Path, twins: bool, copies: NeighbourCopies) -> None:
        self._job, self._directory, self.twins, self._copies = job, directory, twins, copies
        self._times = 0
        self._at: tuple[int, int] = (-1, 0)
        """The step after which the last recovery went on, and how many did so in a row."""

    def part(self, workers: WorkerGroup, error: BaseException) -> LostWorkers:
        """Find who died, and have all others part; ``error`` is the failure that was noticed.

        Raises:
            BaseException: ``error`` or its cause, where nothing has died, or the same would happen again.
            RaypipeError: the run can only restart.
        """
        began = time.monotonic()
        if is_final(own_error(error)):
            raise error
        standings, dead, hung = self._part(workers)
        if not dead:
            raise error
        living = {rank: actor for rank, actor in enumerate(workers.actors) if rank not in dead}
        stuck = hung or ask_places(self._directory, workers.locations, workers.apart, living)
        cause = root_cause(error if hung else dead[min(dead)], workers.newest_calls())
        if is_final(cause) or isinstance(cause, DeviceError):
            raise cause
        marks = {"parted": time.monotonic()}
        return LostWorkers(standings, tuple(sorted(dead)), describe(cause), stuck, began, marks)

    def from_twins(
        self,
        workers: WorkerGroup,
        running: Running,
        lost: LostWorkers,
        error: BaseException,
        measures: bool,
        left_out: int,
    ) -> Recovered | None:
        """Replace the workers that died, and bring all to the end of the same step; None if a stage has no twin left.

        Args:
            workers: the worker group, in which the replacements take the places of the dead.
            running: the plan that devices run from now on.
            lost: the result of ``part``.
            error: the failure that was noticed.
            measures: whether the recomputed layers may change during the run.
            left_out: number of mini-batches of training data that were left out before.

        Raises:
            BaseException: ``error``, where too many workers have died after the same step.
            RaypipeError: the recovery failed; the run can only restart.
        """
        moved = _moved(running, lost.dead) if self.twins else None
        if moved is None:
            return None
        standings = lost.standings.values()
        done = agreed_steps(standings)
        facts = {one.step: one for standing in standings for one in standing.facts}
        from_pool = self.replace(workers, lost, done, error)
        setups = setups_of(workers, self._job, running, self._directory, None, measures, done, True, left_out)
        ray.get(workers.call_each("rejoin", [(one, moved, facts.get(done - 1)) for one in setups]))
        repeated = max(one.begun for one in standings) - done
        return Recovered(done, facts, from_pool, max(0, repeated))

    def replace(self, workers: WorkerGroup, lost: LostWorkers, done: int, error: BaseException) -> int:
        """Put new workers in the places of the dead, to go on after ``done`` steps; return how many waited already.

        Raises:
            BaseException: ``error``, where too many have died after the same step, or a node of an elastic run is gone.
            TransportError: a replacement does not start, for instance since no other node has room for those of a lost
                one.
            ClusterError: it is on a node that cannot run the job with the others.
        """
        _wait_until_given_up({workers.locations[rank].peer.node for rank in lost.dead})
        self._at = (done, self._at[1] + 1 if self._at[0] == done else 1)
        elastic = self._job.train.elastic is not None
        assert workers.places is not None
        if self._at[1] > AT_ONE_STEP or (elastic and workers.places.place.is_broken()):
            raise error
        workers.elsewhere_s = 0.0 if elastic else ELSEWHERE_S
        known = {at.peer.node for at in workers.locations}
        result = self._replace(workers, lost.dead)
        lost.marks["started"] = time.monotonic()
        workers.calls.clear()  # they failed because of what is mended now
        if not {at.peer.node for at in workers.locations} <= known:
            timeout_s = self._job.train.message_timeout_s
            workers.apart = check_hosts(workers.actors, workers.locations, self._directory, timeout_s)
        return result

    def _part(self, workers: WorkerGroup) -> tuple[dict[int, Standing], dict[int, RayActorError], str]:
        """Have all workers part; return how far the living are, the errors of the dead by rank, and what hung.

        Whoever does not answer within ``train.message_timeout_s`` hangs: its process is ended, and it counts as dead.
        So does at once who cannot be reached, or is stopped and has been in the same task for that long already.

        Raises:
            TransportError: a process that hangs cannot be ended.
        """
        asked = {actor.part.remote(): rank for rank, actor in enumerate(workers.actors)}
        standings: dict[int, Standing] = {}
        dead: dict[int, RayActorError] = {}
        ended: dict[int, float] = {}
        """When they were killed, by rank."""
        waiting: list[Any] = list(asked)
        timeout_s, hung = self._job.train.message_timeout_s, ""
        deadline = time.monotonic() + timeout_s
        look = min(deadline, time.monotonic() + STOPPED_S)
        while waiting:
            for rank in self._unreachable(workers, {asked[ref] for ref in waiting}, ended):
                ended[rank] = time.monotonic()
                ray.kill(workers.actors[rank])  # else its calls wait until Ray knows
            ready, waiting = ray.wait(waiting, timeout=max(0.0, min(LOOK_S, look - time.monotonic())))
            late, now = {asked[ref] for ref in waiting}, time.monotonic()
            stays = [rank for rank in late & ended.keys() if now >= max(ended[rank], deadline) + ENDED_S]
            if not ready and stays:
                title = workers.titles[min(stays)]
                raise TransportError(title, "hangs, and its process does not end", "end it, or look at its node")
            if not ready and now >= look:
                over = now >= deadline
                idle = {rank: one for rank, one in enumerate(workers.actors) if rank not in late | ended.keys()}
                places = ask_places(self._directory, workers.locations, workers.apart, idle).told()
                stopped = {one.rank: one.seconds for one in places if one.process == STOPPED and one.rank in late}
                hangs = {rank for rank in late if over or stopped.get(rank, 0.0) >= timeout_s} - ended.keys()
                # One that was stopped later may go on until it has been in its task for the timeout.
                rest = [timeout_s - seconds for seconds in stopped.values() if seconds < timeout_s]
                look = inf if over else min(deadline, now + min(rest, default=timeout_s))
                if hangs and not hung:
                    hung = stuck_message(places) or workers.titles[min(hangs)]
                for rank in hangs:
                    ended[rank] = now
                    ray.kill(workers.actors[rank])
            for ref in ready:
                try:
                    if (standing := ray.get(ref)) is not None:
                        standings[asked[ref]] = standing
                except RayActorError as error:
                    dead[asked[ref]] = error
        for rank in ended.keys() - dead.keys():  # it has answered before
            standings.pop(rank, None)
            dead[rank] = RayActorError(error_msg=f"{workers.titles[rank]} is ended with its node")
        return standings, dead, hung

    def _unreachable(self, workers: WorkerGroup, waiting: Collection[int], known: Collection[int]) -> set[int]:
        """Return the ranks that cannot be reached any more, among them all those of a node without its raylet.

        Copies that the living are sending there are not waited for.

        Args:
            workers: the worker group.
            waiting: ranks that have not answered.
            known: ranks that it has returned before: to ask after a node that does not answer takes seconds.
        """
        lost, nodes = workers.unreachable().difference(known), [at.peer.node for at in workers.locations]
        without = gone({nodes[rank] for rank in lost.union(waiting).difference(known)})
        for node in without:
            self._copies.lost(node)
        return lost | {rank for rank, node in enumerate(nodes) if node in without}.difference(known)

    def _replace(self, workers: WorkerGroup, dead: Iterable[int]) -> int:
        """Put new workers in the places of dead ones; return how many of them were waiting already."""
        assert workers.places is not None
        self._times += 1
        from_pool = 0
        for rank in sorted(dead):
            title = workers.titles[rank]
            ray.kill(workers.actors[rank])  # its node may only be out of reach for now
            node = workers.locations[rank].peer.node
            standby = workers.waiting.take(node)
            if standby is not None:
                from_pool += 1
                standby.become.remote(rank, title)
            workers.actors[rank] = standby or workers.places.start(rank, title, self._times)
        workers.run_id = f"{workers.places.place.run_id}.{self._times}"
        workers.locate()
        return from_pool


def _wait_until_given_up(nodes: Collection[str]) -> None:
    """Wait until Ray has given up those of nodes that are gone: what it starts there before then ends with them."""
    deadline = time.monotonic() + GIVEN_UP_S
    while (lost := gone(nodes)) and time.monotonic() < deadline:
        if not lost & {node["NodeID"] for node in ray.nodes() if node["Alive"]}:
            return
        time.sleep(LOOK_S)


def in_place_for(
    job: JobSpec, running: Running, workers: WorkerGroup, directory: Path, copies: NeighbourCopies
) -> InPlace | None:
    """Return what replaces workers that die, by twins or else ``copies`` in nodes' memory; None where neither can."""
    twins = _can_recover(job, running, workers)
    can = twins or (copies.made and _can_replace(job, running, workers))
    return InPlace(job, directory, twins, copies) if can else None


class LeavingWorkers:
    """Workers that were told to end (SIGTERM, as before a preemption) and go between two steps: none is repeated."""

    def __init__(self) -> None:
        self._ranks: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._ranks)

    def heard(self, results: Sequence[StepResult]) -> None:
        """Take in what workers report with a step, by rank."""
        self._ranks = [rank for rank, result in enumerate(results) if result.leaves] or self._ranks

    def let_go(self, workers: WorkerGroup, done: int, log: RunLog) -> None:
        """End them, if there are any; nothing may be queued, and what they hold is saved or has a twin.

        Raises:
            TransportError: they are gone.
        """
        ranks, self._ranks = self._ranks, []
        if not ranks:
            return
        titles = ", ".join(workers.titles[rank] for rank in ranks)
        log.event("notice", message=f"{titles}: told to end (SIGTERM), goes after step {done}")
        for rank in ranks:
            ray.kill(workers.actors[rank])
        deadline = time.monotonic() + ENDED_S
        for rank in ranks:  # one that still answered would count as living
            with suppress(RayActorError):
                while time.monotonic() < deadline:
                    ray.get(workers.actors[rank].clock.remote())
        raise TransportError(titles, "was told to end (SIGTERM)", "see what ends processes on its node")


RECOVERABLE = (RayError, RaypipeError)
"""Errors that the loss of a worker may show in."""
