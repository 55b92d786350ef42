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

import psutil

STARTS_S = 180.0
"""Longest wait until it answers; it starts Ray and the workers, on a machine that may be busy."""


class Server:
    """A server that answers."""

    def __init__(self, words: list[str], port: int, folder: Path, environment: Mapping[str, str]) -> None:
        self.url, self.log, self.run = f"http://127.0.0.1:{port}", folder / "serve.log", folder / "served"
        self._words, self._port, self._environment = words, port, dict(environment)

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, *options: str) -> None:
        """Start it, and wait until it answers."""
        words = [*self._words, "--port", str(self._port), "--run-dir", str(self.run), *options]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                words, stdout=out, stderr=out, cwd=Path(__file__).parents[2], env=self._environment
            )
        deadline = time.monotonic() + STARTS_S
        while not (f" at {self.url}" in self.log.read_text() and _answers(self._port)):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill it, which it cannot notice; what it has started ends with it, or a moment later."""
        family = psutil.Process(self.pid).children(recursive=True)
        self.process.kill()
        self.process.wait(60)
        _, left = psutil.wait_procs(family, 20)
        for process in left:
            process.kill()

    def end(self) -> None:
        """End it by SIGTERM, as it should be ended."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        assert status == 128 + signal.SIGTERM, self.log.read_text()


@contextlib.contextmanager
def serving(job: Path, folder: Path, environment: Mapping[str, str], *options: str) -> Iterator[Server]:
    """Serve a job by the command on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server([sys.executable, "-m", "raypipe", "serve", str(job), *options], port, folder, environment)
    try:
        server.start()
        yield server
    except BaseException:
        server.process.kill()
        raise
    server.end()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
