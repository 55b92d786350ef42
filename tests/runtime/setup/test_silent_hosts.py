"""A host that loses its network is noticed; a process that is stopped, and a slow link, are not taken for it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raypipe.runtime.setup.network import LOOK_S, LOOKS, SILENT_S
from tests.hosts import Host, environment, hosts

pytestmark = [pytest.mark.runs, pytest.mark.own_ray]  # it starts none, but waits most of the time

SERVES = """
import socket, threading
listener = socket.create_server(("ADDRESS", 7000))
def read(connection):
    while connection.recv(1 << 16):
        connection.send(b".")
print("ready", flush=True)
while True:
    threading.Thread(target=read, args=(listener.accept()[0],), daemon=True).start()
"""
CALLS = """
import os, socket, threading
from raypipe.runtime.setup.network import SilentHosts
def call():
    return socket.create_connection(("ADDRESS", 7000))
SilentHosts(["ADDRESS"])
def fill(connection):
    try:
        while connection.send(bytes(1 << 16)):
            pass
    except OSError:
        os.write(1, b"sender\\n")
if FILLS:
    threading.Thread(target=fill, args=(call(),)).start()
idle = call()
print("ready", flush=True)
try:
    idle.recv(1)
except OSError:
    pass
os.write(1, b"reader\\n")
"""
MOST_S = SILENT_S + (LOOKS + 1) * LOOK_S + 1.0


@contextmanager
def running(host: Host, code: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        host.command(sys.executable, "-c", code),
        stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3], env=environment(),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        process.kill()
        process.wait()


def says(process: subprocess.Popen[str], seconds: float, lines: int = 1) -> set[str]:
    """Return the lines of a process that come in so many seconds, at most some."""
    assert process.stdout is not None
    result, end = b"", time.monotonic() + seconds
    while result.count(b"\n") < lines and select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (more := os.read(process.stdout.fileno(), 1 << 10)):
            break
        result += more
    return set(result.decode().split())


@pytest.mark.parametrize("fills", [False, True], ids=["idle", "with data on its way"])
def test_only_a_host_without_its_network_is_lost(fills: bool) -> None:
    with hosts(2) as (here, there), running(there, SERVES.replace("ADDRESS", there.address)) as server:
        code = CALLS.replace("ADDRESS", there.address).replace("FILLS", str(fills))
        with running(here, code) as client:
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            for pid in map(int, children or [str(server.pid)]):
                os.kill(pid, signal.SIGSTOP)
            assert not says(client, MOST_S)  # its buffers are full by then
            for pid in map(int, children or [str(server.pid)]):
                os.kill(pid, signal.SIGCONT)
            for host in (here, there):
                slow = ["rate", "0.2mbit", "burst", "32kb", "latency", "400ms"]
                host.must("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *slow)
            assert not says(client, 2 * MOST_S)
            began = time.monotonic()
            there.must("ip", "link", "set", "eth0", "down")
            assert says(client, MOST_S, 1 + fills) == ({"sender", "reader"} if fills else {"reader"})
            assert time.monotonic() - began > SILENT_S - LOOK_S
