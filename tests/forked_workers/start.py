"""Start this process's fork server."""

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

from tests.forked_workers.setup_worker import SERVER


@cache
def worker_program() -> str:
    """Start the server, which ends with this process; return what Ray's nodes are to run for a worker."""
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
    return str(Path(__file__).with_name("setup_worker.py"))
