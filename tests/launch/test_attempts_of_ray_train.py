"""Attempts at a run: one at a time, counted, and started again by whoever is left."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from raypipe import train as train_run
from raypipe.errors import RunError
from raypipe.job.spec import load_job
from raypipe.observe.run_log import EVENTS, RunLog, read_rows
from raypipe.runtime.cluster import attempts
from raypipe.runtime.cluster.attempts import RunRequest, failure_logged, failures
from raypipe.train import start_run


def log_of(directory: Path, *kinds: str) -> None:
    log = RunLog(directory)
    for kind in kinds:
        log.event(kind, message="m")


@pytest.mark.parametrize(
    ("kinds", "told", "count"),
    [
        (["run", "started"], False, 0),
        (["run", "started", "failed"], True, 1),
        (["run", "failed", "restarted", "started"], False, 1),
        (["run", "failed", "restarted", "run", "failed"], True, 1),  # resumed: the earlier ones do not count
        (["run", "failed", "restarted", "checkpoint", "failed"], True, 2),
    ],
)
def test_failures_are_read_off_the_events(kinds: list[str], told: bool, count: int, tmp_path: Path) -> None:
    log_of(tmp_path, *kinds)
    assert failure_logged(tmp_path) is told
    assert failures(tmp_path) == count


@dataclass
class Trainers:
    """Ray Train, whose controller dies ``deaths`` times."""

    deaths: int
    allowed: list[int] = field(default_factory=list)

    def make(self, _request: Any, restarts: int, _callbacks: Any) -> Any:
        self.allowed.append(restarts)
        return self

    def fit(self) -> str:
        if len(self.allowed) <= self.deaths:
            raise RayActorError("1d2c", "The actor died.\n\tclass_name: TrainController")
        return "result"


def test_the_dashboard_is_told_of_the_run_unless_the_user_says_otherwise(tmp_path, monkeypatch) -> None:
    import ray.train.torch

    class Trainer:
        def __init__(self, *_args: object, **_options: object) -> None:
            pass

        def fit(self) -> str | None:
            return os.environ.get("RAY_TRAIN_ENABLE_STATE_TRACKING")  # Ray Train reads it in fit()

    monkeypatch.setattr(ray.train.torch, "TorchTrainer", Trainer)
    monkeypatch.setattr(train_run, "this_node", dict)  # there is no Ray to ask
    job = load_job(Path("jobs/quickstart.yaml"), ())
    request = RunRequest(job, tmp_path, False, SimpleNamespace())
    monkeypatch.setenv("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")
    assert start_run(request) == "0"
    monkeypatch.delenv("RAY_TRAIN_ENABLE_STATE_TRACKING")
    assert start_run(request) == "1"


UNPICKLED = """
import pickle, sys
pickle.load(sys.stdin.buffer)
print([name for name in ("raypipe", "torch") if name in sys.modules])
"""


def test_its_controller_needs_neither_raypipe_nor_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose controller died waits until another one has started: torch alone takes longer than the rest."""
    from ray import cloudpickle

    monkeypatch.setattr(train_run, "this_node", dict)  # there is no Ray to ask
    request = RunRequest(load_job(Path("jobs/quickstart.yaml"), ()), tmp_path, False, SimpleNamespace())
    trainer = train_run._trainer(request, 1, ())
    sent = cloudpickle.dumps((trainer.train_run_context, trainer._create_default_callbacks()))
    done = subprocess.run([sys.executable, "-c", UNPICKLED], input=sent, capture_output=True)
    assert done.stdout.decode().strip() == "[]", done.stderr.decode()


def test_no_process_of_it_is_for_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_run, "this_node", dict)
    request = RunRequest(load_job(Path("jobs/quickstart.yaml"), ()), tmp_path, False, SimpleNamespace())
    callbacks = train_run._trainer(request, 1, ())._create_default_callbacks()
    kinds = {type(one).__name__ for one in callbacks}
    assert "DatasetsCallback" not in kinds
    assert {"BackendSetupCallback", "UserCallbackHandler"} <= kinds  # the others stay


def request_of(directory: Path, max_failures: int) -> Any:
    return SimpleNamespace(directory=directory, job=SimpleNamespace(train=SimpleNamespace(max_failures=max_failures)))


def test_a_dead_controller_is_a_failure_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_of(tmp_path, "run")
    trainers = Trainers(deaths=2)
    monkeypatch.setattr(train_run, "_trainer", trainers.make)
    assert start_run(request_of(tmp_path, 3)) == "result"
    assert trainers.allowed == [3, 2, 1]
    said = [row["message"] for row in read_rows(tmp_path / EVENTS) if row["event"] == "failed"]
    assert said == ["Ray Train's controller died"] * 2


def test_after_as_many_as_are_allowed_it_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_of(tmp_path, "run", "failed", "restarted")  # one of them was the driver's
    trainers = Trainers(deaths=9)
    monkeypatch.setattr(train_run, "_trainer", trainers.make)
    with pytest.raises(RunError, match="Ray Train's controller died") as caught:
        start_run(request_of(tmp_path, 2))
    assert "\n" not in caught.value.why
    assert trainers.allowed == [2, 0]


@pytest.mark.slow
def test_attempts_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def second() -> None:
        with attempts._only_attempt(tmp_path) as restarted:
            order.append(("second", restarted))

    with attempts._only_attempt(tmp_path) as restarted:
        order.append(("first", restarted))
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.5)
        order.append(("first ends", restarted))
    thread.join(20)
    assert order == [("first", False), ("first ends", False), ("second", True)]
    monkeypatch.setattr(attempts, "LAST_ATTEMPT_S", 0.3)
    with (
        attempts._only_attempt(tmp_path),
        pytest.raises(RunError, match="does not end"),
        attempts._only_attempt(tmp_path),
    ):
        pass
