"""One local Ray and one pool of stage actors for the whole session: an actor that imports torch takes seconds."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.forked_workers.start import worker_program
from tests.job_files import write_text
from tests.ray_environment import LEAN, start_ray

if TYPE_CHECKING:
    from raypipe.capture.captured import Captured

# The same examples in every CI run: what fails there fails here. Elsewhere each run looks at new ones. How long one
# takes says something of the machine's load only.
CALM: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, **CALM)
settings.register_profile("here", **CALM)
settings.load_profile("ci" if os.environ.get("CI") else "here")

os.environ |= LEAN
# Tensors of tests are tiny: a second thread of torch's would only wait for the first, and take a processor for that.
os.environ["OMP_NUM_THREADS"] = "1"

DEVICES = 8
"""Most that any test takes of the pool, and that any fleet has of its own beside it."""

# Nothing of a test run is found by the next one, nor by the user's own runs. The processes of one run, also those that
# `make test` starts beside one another, share what takes seconds to make: captured models and compiled kernels.
CACHE = "RAYPIPE_TESTS_CACHE"
if CACHE not in os.environ:
    os.environ[CACHE] = tempfile.mkdtemp(prefix="raypipe-tests-")
    atexit.register(shutil.rmtree, os.environ[CACHE], ignore_errors=True)
os.environ["RAYPIPE_CACHE_DIR"] = os.environ[CACHE]


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have what starts Ray marked as such; ``make unit`` starts none."""
    for item in items:
        starts = "local_ray" in getattr(item, "fixturenames", ()) or item.get_closest_marker("own_ray") is not None
        if starts and item.get_closest_marker("runs") is None:
            raise pytest.UsageError(f"{item.nodeid} starts Ray: mark it with @pytest.mark.runs")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Have one fork server for all that the tests start; it imports nothing before it is asked."""
    if any(item.get_closest_marker("runs") for item in session.items) and not session.config.option.collectonly:
        worker_program()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests with one of these marks are asked for, leave files without it unread: they import torch."""
    asked = next((m for m in ("own_ray", "runs") if (config.option.markexpr or "").startswith(m)), None)
    if asked is None or collection_path.suffix != ".py":
        return None
    return True if f"pytest.mark.{asked}" not in collection_path.read_text("utf-8") else None


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    import ray

    already = ray.is_initialized()
    if not already:
        start_ray(2 * DEVICES + 1)
    yield
    if not already:
        ray.shutdown()


@pytest.fixture(scope="session")
def stage_pool(local_ray: None) -> Iterator[Callable[[int], object]]:
    """``stage_pool(n)`` is a fleet of the first n of the session's stage actors."""
    from raypipe.runtime.worker.worker import StageWorker
    from tests.actor_pool import actor_pool

    with actor_pool(StageWorker, "stage actor") as pool:
        yield pool


@pytest.fixture
def driver_here(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``raypipe train`` in this process starts stage actors, but no Ray Train."""
    from tests.driver_here import without_ray_train

    without_ray_train(monkeypatch.setattr)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small folder of real text: some of this Python's own modules."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def captured() -> Callable[[str], Captured]:
    """``captured("gpt2")`` as it is read back; each model is captured once, by whichever process asks first."""

    @cache
    def one(name: str) -> Captured:
        from raypipe.capture.captured import load_kept, save

        key = f"tests-{name}"
        kept = load_kept(key)
        if kept is None:
            from raypipe.capture.capture import capture
            from raypipe.capture.meta import build_without_memory
            from tests.capture.models import CASES

            made = capture(build_without_memory(CASES[name].build), CASES[name].data(2, 16))
            save(key, made)
            kept = load_kept(key)
            assert kept is not None
            assert kept.graph == made.graph, f"{name} is read back otherwise than it was captured"
        return kept

    return one


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``command("schedule", "1f1b")``: the status and both outputs of ``raypipe`` in this process."""
    from raypipe.cli import run

    def call(*argv: object) -> tuple[int, str, str]:
        status = run([str(word) for word in argv])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


@pytest.fixture
def pythons_own_handlers() -> Iterator[None]:
    """Begin with Python's handlers of signals.

    Ray, and other tests in this process, leave theirs; whoever starts the tests in the background has SIGINT ignored.
    """
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler or signal.SIG_DFL)
