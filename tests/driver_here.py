"""Runs whose driver is in this process instead of Ray Train's worker; all else is as ``raypipe train`` has it.

Ray Train starts four processes of its own, which take three quarters of a short run's time. What Ray Train itself does
for a run is tested with it: ``tests/runtime/runs/test_train_command.py``, ``test_killed.py``, ``test_ray_head.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock


def without_ray_train(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Start no Ray Train from now on; ``replace`` sets an attribute, as ``monkeypatch.setattr`` does."""
    import ray.train

    from raypipe import train

    replace(train, "start_run", _start_run)
    replace(ray.train, "report", lambda *_args, **_options: None)


@mock.patch.dict(os.environ)  # a driver hides GPUs from its own process, which ends with it where Ray Train starts it
def _start_run(request: Any, _callbacks: Sequence[Any] = ()) -> None:
    """The driver's attempts, one after another while it raises, as Ray Train makes them."""
    from raypipe.runtime.cluster.attempts import ATTEMPTED, driver_loop

    (request.directory / ATTEMPTED).unlink(missing_ok=True)
    for left in reversed(range(request.job.train.max_failures + 1)):
        try:
            return driver_loop(request)
        except Exception:
            if not left:
                raise
    return None
