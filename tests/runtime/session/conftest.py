"""Two stage actors of sessions for all tests of a file: one that imports torch takes seconds."""

from __future__ import annotations

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
    from raypipe.runtime.session.session import Session
    from raypipe.runtime.session.session_worker import StageSession
    from raypipe.train import make_plan
    from tests.actor_pool import actor_pool

    with actor_pool(StageSession, "session actor") as pool:

        def opened(job: JobSpec, directory: Path | None = None) -> Session:
            workers = pool(job.parallel.stages * job.parallel.replicas)
            where = directory or tmp_path_factory.mktemp("session")
            session = Session(job, make_plan(job), where, workers)
            session.set_up()
            return session

        yield opened
