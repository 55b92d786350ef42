"""``raypipe serve`` as a process of its own, for tests and benches of the whole command."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

STARTS_S = 180.0
"""Longest wait until it answers; it starts Ray and the workers, on a machine that may be busy."""


class Server(NamedTuple):
    """A server that answers."""

    url: str
    pid: int
    log: Path
    run: Path
    """Directory of its run."""


@contextlib.contextmanager
def serving(job: Path, folder: Path, environment: Mapping[str, str], *options: str) -> Iterator[Server]:
    """Serve a job by the command on a free port; it ends by SIGTERM, as it should."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run, log, url = folder / "served", folder / "serve.log", f"http://127.0.0.1:{port}"
    words = [sys.executable, "-m", "raypipe", "serve", str(job), "--port", str(port), "--run-dir", str(run), *options]
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, cwd=Path(__file__).parents[2], env=dict(environment))
    try:
        deadline = time.monotonic() + STARTS_S
        while not (f" at {url}" in log.read_text() and _answers(port)):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield Server(url, process.pid, log, run)
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    assert status == 128 + signal.SIGTERM, log.read_text()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
