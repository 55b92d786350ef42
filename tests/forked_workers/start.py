"""Start a fork server for this process and those that it starts."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.forked_workers.setup_worker import SERVER


@cache
def worker_program() -> str:
    """Return what Ray's nodes are to run for a worker, served by the server of the process that has started this one.

    Where that has none, a server is started, which ends with this process.
    """
    if not Path(os.environ.get(SERVER, "")).is_socket():
        _start_server()
    return str(Path(__file__).with_name("setup_worker.py"))


def fork_workers(parameters: Any, _head: bool) -> None:
    """Change parameters of a node that ``ray start`` starts, where RAY_START_HOOK names this function."""
    parameters.worker_path = parameters.setup_worker_path = worker_program()
    parameters.include_log_monitor = False
    parameters.include_dashboard = parameters.include_dashboard or False  # None: wherever it is installed


def _start_server() -> None:
    folder = tempfile.mkdtemp(prefix="fork-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[SERVER] = f"{folder}/server"
    # One thread each, as workers without a GPU have it: libraries read that when they are loaded.
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(os.environ[SERVER])
        door.listen(64)  # who comes before it serves waits
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.forked_workers.fork_server", str(door.fileno())], stdin=subprocess.PIPE,
            pass_fds=[door.fileno()], cwd=Path(__file__).parents[2], env={**os.environ, **single},
        )  # fmt: skip
    atexit.register(server.communicate)  # it ends when its standard input does
