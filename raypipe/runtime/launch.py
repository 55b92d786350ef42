"""Stage actors: one placement group, one actor per device, names that say what each one does."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypipe.errors import RunError
from raypipe.runtime.actor import Stage
from raypipe.runtime.devices import DeviceRequest
from raypipe.runtime.links import Location
from raypipe.runtime.transport.shared_memory import cleanup
from raypipe.schedule.ir import Schedule


@dataclass(slots=True)
class Fleet:
    """The running stage actors of one attempt, by rank."""

    actors: list[Any]
    titles: list[str]
    locations: list[Location]
    group: PlacementGroup
    run_id: str

    def call(self, method: str, *args: object) -> list[Any]:
        """Queue one call on every actor, in rank order; returns the references."""
        return [getattr(actor, method).remote(*args) for actor in self.actors]

    def stop(self) -> None:
        """End all actors and give their devices back."""
        for actor in self.actors:
            ray.kill(actor)
        remove_placement_group(self.group)
        cleanup(self.run_id)  # a killed actor leaves its shared memory behind


def device_title(schedule: Schedule, device: int, copies: int) -> str:
    """How the dashboard and errors call a device: its stages, its data-parallel copy, its direction.

    A device with several stage replicas names them all: ``stage 0 · replica 0 · down + stage 3 · replica 0 · up``.
    """
    per_copy = schedule.replicas // copies
    parts = []
    for replica, held in enumerate(schedule.placement):
        stages = [str(s) for s, d in enumerate(held) if d == device]
        if stages:
            noun = "stage" if len(stages) == 1 else "stages"
            direction = "" if per_copy == 1 else " · down" if replica % per_copy < per_copy // 2 else " · up"
            parts.append(f"{noun} {','.join(stages)} · replica {replica // per_copy}{direction}")
    return " + ".join(parts)


def start_fleet(
    schedule: Schedule,
    copies: int,
    request: DeviceRequest,
    actor_class: type = Stage,
    timeout_s: float = 120.0,
    tensor: int = 1,
) -> Fleet:
    """Reserve the devices of a schedule and start an actor for each of their ``tensor`` members.

    They are made with ``actor_class(rank, title)``.

    Raises:
        RunError: the devices were not free within ``timeout_s``.
    """
    titles = [
        device_title(schedule, d, copies) + (f" · tensor {m}" if tensor > 1 else "")
        for d in range(schedule.devices)
        for m in range(tensor)
    ]
    return start_actors(titles, request, actor_class, timeout_s)


def start_actors(titles: list[str], request: DeviceRequest, actor_class: type, timeout_s: float = 120.0) -> Fleet:
    """Reserve a device for each title and start ``actor_class(rank, title)`` on it.

    Raises:
        RunError: the devices were not free within ``timeout_s``.
    """
    run_id = uuid.uuid4().hex[:8]
    group = placement_group([request.bundle() for _ in titles], strategy="PACK", name=f"raypipe {run_id}")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        raise RunError(
            "devices",
            f"{len(titles)} x {request.describe()} were not free within {timeout_s:.0f} s",
            "wait for other jobs to end, or ask for fewer stages or replicas",
        )
    # One compute thread per device: stages share the host's cores with each other, not with a thread pool.
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if request.gpus == 0 else {}
    actors = [
        ray.remote(actor_class)
        .options(
            name=f"{title} · device {rank} · {run_id}",
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            num_cpus=request.cpus,
            num_gpus=request.gpus,
            runtime_env={"env_vars": threads} if threads else {},
            max_restarts=0,
        )
        .remote(rank, title)
        for rank, title in enumerate(titles)
    ]
    fleet = Fleet(actors, titles, [], group, run_id)
    try:
        fleet.locations += ray.get(fleet.call("locate"), timeout=timeout_s)
    except BaseException:
        fleet.stop()  # nobody else has it yet
        raise
    return fleet
