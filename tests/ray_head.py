"""A real head for tests: ``ray start --head``, with its dashboard, job server and metrics agent.

The dashboard, and with it the job server, listens on loopback; the rest of a head started so listens on the host's own
address, whatever it is told. All of it asks for a token, which nobody else knows.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from raypipe.runtime.setup.communicators import own_address
from tests.ray_environment import without_ray

START_S = 90.0


@dataclass(frozen=True)
class Head:
    """A running head."""

    address: str
    """Where drivers and nodes join."""
    dashboard: str
    """Where jobs are submitted."""
    metrics: str
    """What Prometheus scrapes."""
    folder: Path
    """Its temporary files."""
    token: dict[str, str]
    """Environment variables that let a client in."""

    def exported(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """What the metrics agent exports now, by name: tags and values."""
        from prometheus_client.parser import text_string_to_metric_families

        asked = urllib.request.Request(
            self.metrics, headers={"Authorization": f"Bearer {self.token['RAY_AUTH_TOKEN']}"}
        )
        with urllib.request.urlopen(asked, timeout=10) as answer:
            text = answer.read().decode()
        result: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                result.setdefault(sample.name, []).append((sample.labels, sample.value))
        return result


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at now.

    They are none that Linux gives to who asks for any port (from 32768 on), nor those of Ray's workers (to 19999). Else
    another process may have one before the head has, whose agent then goes on without the server that jobs need.
    """
    with contextlib.ExitStack() as stack:
        result: list[int] = []
        while len(result) < count:
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("", port := 20_000 + secrets.randbelow(12_000))))
                result.append(port)
        return result


@contextlib.contextmanager
def ray_head(cpus: int = 2, options: Sequence[str] = (), port: int | None = None, **settings: str) -> Iterator[Head]:
    """A head of ``cpus`` for the block, in a process group of its own.

    ``options`` are further ones of ``ray start``, ``settings`` environment variables; ``port`` is where nodes join.
    """
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: sockets below it have names of at most 107 bytes
    gcs, dashboard, metrics, client, agent = free_ports(5)
    gcs = port or gcs
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = without_ray(**token, **settings)
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    words = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={gcs}",
        "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}", f"--metrics-export-port={metrics}",
        f"--ray-client-server-port={client}", f"--num-cpus={cpus}",
        f"--temp-dir={folder}", "--object-store-memory=100000000", *options,
    ]  # fmt: skip
    log = (folder / "head.log").open("w")
    process = subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        address = f"{own_address()}:{gcs}"
        head = Head(address, f"http://127.0.0.1:{dashboard}", f"http://127.0.0.1:{metrics}", folder, token)
        for url in (f"{head.dashboard}/api/version", head.metrics):
            _wait_for(url, process, folder / "head.log")
        yield head
    finally:
        log.close()
        _end(process)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError:  # it answers, and asks for its token
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the head does not come up at {url}: {log.read_text()}") from None
            time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the group: the head and all that it has started, whose files are removed anyway."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
