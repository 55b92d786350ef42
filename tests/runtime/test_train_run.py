"""What a failure inside an actor is called, once it has come through Ray."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray

from raypipe.errors import CheckpointError, RunError, TransportError
from raypipe.job.load import load_job
from raypipe.runtime.devices import DeviceRequest
from raypipe.runtime.train_run import RunRequest, describe, start_run

OWN = TransportError("1F0 of step 1, rank 0", "nothing came", "look there")


def through_ray(error: Exception) -> Exception:
    """The error as ``ray.get`` raises it: of the cause's class, with a traceback for its text."""
    try:
        raise error
    except Exception as caught:
        return ray.exceptions.RayTaskError("run_step", "Traceback ...", caught).as_instanceof_cause()


@pytest.mark.parametrize("error", [OWN, CheckpointError("step-1", "is damaged", "use an earlier one")])
def test_raypipes_own_error_is_told_without_rays_wrapping(error) -> None:
    assert isinstance(through_ray(error), type(error))
    assert describe(error) == str(error)
    assert describe(through_ray(error)) == str(error)
    assert describe(through_ray(through_ray(error))) == str(error)
    outer = RuntimeError("training failed")
    outer.__cause__ = through_ray(error)
    assert describe(outer) == str(error)


def test_other_errors_are_one_line() -> None:
    assert describe(ValueError("a\nb\nc")) == "ValueError: a"
    assert describe(KeyError()) == "KeyError: "
    assert "\n" not in describe(through_ray(ZeroDivisionError("division by zero")))


def test_the_innermost_of_our_errors_is_the_cause() -> None:
    outer = RunError("run", "failed")
    outer.__cause__ = ValueError("x")
    assert describe(outer) == "run: failed"


def test_the_dashboard_is_told_of_the_run_unless_the_user_says_otherwise(tmp_path, monkeypatch) -> None:
    import ray.train.torch

    class Trainer:
        def __init__(self, *_args: object, **_options: object) -> None:
            pass

        def fit(self) -> str | None:
            return os.environ.get("RAY_TRAIN_ENABLE_STATE_TRACKING")  # Ray Train reads it in fit()

    monkeypatch.setattr(ray.train.torch, "TorchTrainer", Trainer)
    job = load_job(Path("jobs/quickstart.yaml"), ())
    request = RunRequest(job, tmp_path, False, DeviceRequest(cpus=1, gpus=0))
    monkeypatch.setenv("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")
    assert start_run(request) == "0"
    monkeypatch.delenv("RAY_TRAIN_ENABLE_STATE_TRACKING")
    assert start_run(request) == "1"
