"""Two stage actors of sessions for all tests of a file: one that imports torch takes seconds."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from raypipe.job.spec import JobSpec
    from raypipe.runtime.session.session import Session


class Opened(Protocol):
    """The fixture."""

    def __call__(self, job: JobSpec, directory: Path | None = None) -> Session: ...


@pytest.fixture(scope="module")
def session_of(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """``session_of(job)`` is a new session on the same actors; an earlier one cannot be used any more.

    With ``directory``, it finds what an earlier one has left there.
    """
    import ray

    from raypipe.runtime.session.session import Session
    from raypipe.runtime.session.session_worker import StageSession
    from raypipe.runtime.worker.worker_group import WorkerGroup
    from raypipe.train import make_plan

    actors: list[object] = []

    def opened(job: JobSpec, directory: Path | None = None) -> Session:
        plan = make_plan(job)
        devices = job.parallel.stages * job.parallel.replicas
        while len(actors) < devices:
            rank = len(actors)
            environment = {"env_vars": {"OMP_NUM_THREADS": "1"}}
            made = ray.remote(StageSession).options(num_cpus=1, runtime_env=environment)
            actors.append(made.remote(rank, f"session actor {rank}"))
        locations = ray.get([actor.locate.remote() for actor in actors[:devices]], timeout=120)
        titles = [x.peer.name for x in locations]
        workers = WorkerGroup(actors[:devices], titles, locations, uuid.uuid4().hex[:8])
        session = Session(job, plan, directory or tmp_path_factory.mktemp("session"), workers)
        session.set_up()
        return session

    yield opened
    for actor in actors:
        ray.kill(actor)
