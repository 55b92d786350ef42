"""Actors that serve one run of this process after another: one that imports torch takes seconds."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from raypipe.runtime.worker.worker_group import WorkerGroup


@contextmanager
def actor_pool(worker: type[Any], title: str) -> Iterator[Callable[[int], WorkerGroup]]:
    """Yield a function that returns a group of the first n actors of the block, started when first asked for."""
    one = ray.remote(worker).options(num_cpus=1, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
    actors: list[Any] = []

    def take(devices: int) -> WorkerGroup:
        actors.extend(one.remote(rank, f"{title} {rank}") for rank in range(len(actors), devices))
        used = actors[:devices]
        locations = ray.get([actor.locate.remote() for actor in used], timeout=120)  # a fresh port for every use
        return WorkerGroup(used, [x.peer.name for x in locations], locations, uuid.uuid4().hex[:8])

    try:
        yield take
    finally:
        for actor in actors:
            ray.kill(actor)
