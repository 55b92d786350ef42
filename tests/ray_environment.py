"""Rays of tests and benches: the environment of processes that they start, and a Ray of this process's own."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.forked_workers.setup_worker import SERVER
from tests.forked_workers.start import worker_program

LEAN = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
}
"""Ray starts a worker per CPU before anybody asks; an actor with environment variables of its own, as raypipe's have,
takes none of them. And nobody looks at the dashboard's Train page, for which a process keeps the state of runs."""


def without_ray(**settings: str) -> dict[str, str]:
    """This process's environment, but for Ray's own variables; ``settings`` are added."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return ours | LEAN | settings


def node_settings(forks: bool = True) -> dict[str, Any]:
    """Parameters of a Ray node that starts no process that shows anything to people; ``forks``: see ``start_ray``."""
    program = worker_program() if forks else None
    workers = {} if program is None else {"setup_worker_path": program, "worker_path": program}
    return {**workers, "include_dashboard": False, "include_log_monitor": False}


def forking() -> dict[str, str]:
    """Return variables for a ``ray start`` whose node forks its workers, also on a host of ``tests.hosts``."""
    worker_program()  # before the command: it would end with that
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return {SERVER: os.environ[SERVER], "RAY_START_HOOK": "tests.forked_workers.start.fork_workers", "PYTHONPATH": path}


@contextmanager
def small_rays(forks: bool = True) -> Iterator[None]:
    """Have ``ray.init`` start nodes of ``node_settings`` for the block."""
    from ray._private.parameter import RayParams

    settings = node_settings(forks)
    del settings["include_dashboard"]  # ``ray.init`` names that one itself
    with mock.patch("ray._private.parameter.RayParams", partial(RayParams, **settings)):
        yield


def start_ray(cpus: int, forks: bool = True) -> str:
    """Start a Ray on loopback that ends with this process; return the address at which others join it.

    ``forks``: its workers are forked from one that has imported what they need. Not where their start is measured.
    """
    import ray

    with small_rays(forks):
        ray.init(
            address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
            configure_logging=False, _node_ip_address="127.0.0.1",
        )  # fmt: skip
    return str(ray.get_runtime_context().gcs_address)


def may_mount() -> bool:
    """Return if this process may mount file systems in a namespace of its own."""
    words = ["unshare", "-m", "--propagation", "private", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(words, capture_output=True, timeout=20, check=False).returncode == 0
    except OSError:
        return False
