"""Replace workers that died while all others keep their processes and their state: the driver's side.

A run can recover so where every stage of a device has a twin: a data-parallel copy, or Chimera's other direction. The
living workers part (``recovery.replacement``), replacements start on the devices of the dead ones, all join in new
groups under a new name, twins send their state to the replacements, and the step that was running is finished or
repeated.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from raypipe.errors import DeviceError, RaypipeError
from raypipe.job.spec import JobSpec
from raypipe.plan.online.better_order import Running
from raypipe.runtime.group.worker_group import WorkerGroup
from raypipe.runtime.recovery.failure import describe, is_final, own_error, root_cause
from raypipe.runtime.recovery.flight_recorder import places_of, told
from raypipe.runtime.recovery.replacement import Transfer, transfers
from raypipe.runtime.set_up_workers import setups_of
from raypipe.runtime.setup.tensor_ranks import expert_ranks
from raypipe.runtime.update.ledger import Facts, Standing, agreed_steps

AT_ONE_STEP = 3
"""Recoveries after the same step, beyond which the run restarts: whatever kills the workers comes with that step."""
NEWEST = 8
"""Calls per worker among which the cause is looked for."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The outcome of a recovery."""

    done: int
    """Number of steps after which all devices go on."""
    facts: Mapping[int, Facts]
    """By step, counted from 0: what all devices have told of the newest of these steps."""
    replaced: tuple[int, ...]
    """Ranks."""
    from_pool: int
    """Replacements that were waiting already."""
    repeated: int
    """Steps that had begun and are run again."""
    cause: str
    stuck: str
    """Where the devices were (``flight_recorder``)."""
    seconds: float
    """From when the death was noticed to when all devices are ready for the next step."""


def can_recover(job: JobSpec, running: Running, workers: WorkerGroup) -> bool:
    """Return whether a run replaces a worker that dies: whichever it is, twins of all its stages live."""
    parallel, schedule, ranks = running.plan.parallel, running.schedule, len(workers.actors)
    return (
        job.train.recovery == "in-place"
        and workers.places is not None
        and ranks > 1
        and workers.on_cpus()
        and schedule.versions == "flush"
        and schedule.sharding is None
        and not parallel.late_updates  # one layer's update can be final on one device and not on another
        and parallel.tensor == 1  # nobody has tried it with ranks that share their layers
        and parallel.transport != "ray-collective"  # it joins a world once in the life of a process
        and all(_moved(running, {rank}) is not None for rank in range(ranks))
    )


def _moved(running: Running, dead: Collection[int]) -> list[Transfer] | None:
    """Return what restores the processes of these ranks; None if a stage, or a share of its experts, is lost."""
    placement, parallel = running.schedule.placement, running.plan.parallel
    shares = expert_ranks(len(placement), parallel.replicas, parallel.experts)
    return transfers(placement, dead, parallel.tensor, shares)


class InPlace:
    """Recovers the workers of one attempt, as often as it takes."""

    def __init__(self, job: JobSpec, directory: Path) -> None:
        self._job, self._directory = job, directory
        self._times = 0
        self._at: tuple[int, int] = (-1, 0)
        """The step after which the last recovery went on, and how many did so in a row."""

    def recover(
        self, workers: WorkerGroup, running: Running, error: BaseException, measures: bool, left_out: int
    ) -> Recovered:
        """Replace the workers that died, and bring all to the end of the same step.

        Args:
            workers: the worker group, in which the replacements take the places of the dead.
            running: the plan that devices run from now on.
            error: the failure that was noticed.
            measures: whether the recomputed layers may change during the run.
            left_out: number of mini-batches of training data that were left out before.

        Raises:
            BaseException: ``error`` or its cause, where nothing has died or a stage has no twin left.
            RaypipeError: the recovery failed; the run can only restart.
        """
        began = time.monotonic()
        if is_final(own_error(error)):
            raise error
        standings, dead = self._part(workers)
        stuck = told(places_of(self._directory, workers.locations, workers.apart))
        if not dead:
            raise error
        cause = root_cause(dead[min(dead)], list(workers.calls)[-NEWEST * len(workers.actors) :])
        if is_final(cause) or isinstance(cause, DeviceError):
            raise cause
        moved = _moved(running, set(dead))
        if moved is None:
            raise error
        done = agreed_steps(standings.values())
        self._at = (done, self._at[1] + 1 if self._at[0] == done else 1)
        if self._at[1] > AT_ONE_STEP:
            raise error
        facts = {one.step: one for standing in standings.values() for one in standing.facts}
        from_pool = self._replace(workers, dead)
        setups = setups_of(workers, self._job, running, self._directory, None, measures, done, True, left_out)
        workers.calls.clear()  # they failed because of what is mended now
        ray.get(workers.call_each("rejoin", [(one, moved, facts.get(done - 1)) for one in setups]))
        repeated = max(one.begun for one in standings.values()) - done
        return Recovered(
            done,
            facts,
            tuple(sorted(dead)),
            from_pool,
            max(0, repeated),
            describe(cause),
            stuck,
            time.monotonic() - began,
        )

    def _part(self, workers: WorkerGroup) -> tuple[dict[int, Standing], dict[int, RayActorError]]:
        """Have all workers part; return how far the living are, and the errors of the dead, by rank."""
        asked = {actor.part.remote(): rank for rank, actor in enumerate(workers.actors)}
        standings: dict[int, Standing] = {}
        dead: dict[int, RayActorError] = {}
        waiting: list[Any] = list(asked)
        deadline = time.monotonic() + self._job.train.message_timeout_s
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RaypipeError("recovery", "a device does not end its step", "see what it does")
            for ref in ready:
                try:
                    standings[asked[ref]] = ray.get(ref)
                except RayActorError as error:
                    dead[asked[ref]] = error
        return standings, dead

    def _replace(self, workers: WorkerGroup, dead: Iterable[int]) -> int:
        """Put new workers in the places of dead ones; return how many of them were waiting already."""
        assert workers.places is not None
        self._times += 1
        from_pool = 0
        for rank in sorted(dead):
            title = workers.titles[rank]
            node = workers.locations[rank].peer.node
            standby = workers.standby.take(node) if workers.standby is not None else None
            if standby is not None:
                from_pool += 1
                standby.become.remote(rank, title)
            workers.actors[rank] = standby or workers.places.start(rank, title, self._times)
        workers.run_id = f"{workers.places.place.run_id}.{self._times}"
        workers.locate()
        return from_pool


RECOVERABLE = (RayError, RaypipeError)
"""Errors that the loss of a worker may show in."""
