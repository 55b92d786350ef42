"""A server on a session of two stages, for all tests of this folder."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.runtime.session.conftest import session_of  # noqa: F401  # the fixture

if TYPE_CHECKING:
    from raypipe.service.service import Service
    from tests.runtime.session.conftest import Opened

BASE = "tiny"


class Serving:
    """A server that runs in a thread of this process."""

    def __init__(self, service: Service, token: str | None = None) -> None:
        import uvicorn

        from raypipe.service.server import make_app

        self.service = service
        self.clients: list[Any] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        app = make_app(service, "127.0.0.1", token)
        self._server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self._server.started:
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.02)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        for client in self.clients:  # whose threads would go on trying to reach the server
            client.close("success").result(10)
        self._server.should_exit = True
        self._thread.join(10)


@pytest.fixture(params=["adapters", "all weights"])
def sampling(
    request: pytest.FixtureRequest,
    session_of: Opened,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    """A server of a model of transformers, or of adapters over it, which it samples from."""
    from raypipe.service.sampling import Sampler
    from raypipe.service.service import Service
    from tests.runtime.session.test_session import LORA, QWEN3, job_of

    adapters = request.param == "adapters"
    job = job_of({}, {**QWEN3, "lora": LORA} if adapters else QWEN3, dtype="float32")
    session = session_of(job)
    sampler = Sampler(job, session.limits.longest, session.limits.vocabulary)
    rank = LORA["r"] if adapters else 0
    service = Service(session, BASE, tmp_path_factory.mktemp("served"), rank, most=4, sampler=sampler)
    service.begin()
    server = Serving(service)
    yield server
    server.stop()
    service.requests.close()


@pytest.fixture
def serving(session_of: Opened, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:  # noqa: F811
    from raypipe.service.service import Service
    from tests.runtime.session.test_session import job_of

    service = Service(session_of(job_of({})), BASE, tmp_path_factory.mktemp("served"), most=2)
    service.begin()
    server = Serving(service)
    yield server
    server.stop()
    service.requests.close()
