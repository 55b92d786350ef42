"""Ray's workers, forked from a process that has imported torch and raypipe, instead of each importing them anew.

A worker that Ray starts imports Ray twice and torch once, which is most of the processor time that a short run takes.
What is forked runs the same program of Ray's, with the same arguments, environment, files and namespaces.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
from pathlib import Path

LARGE = (
    "google.protobuf.message", "jsonschema", "requests",  # half of the time that importing Ray takes
    "raypipe.checkpoint", "raypipe.data", "raypipe.models", "raypipe.runtime.setup.communicators",
    "raypipe.runtime.setup.setup", "raypipe.runtime.stage.stage", "raypipe.runtime.update.gradients",
    "raypipe.plan.online.sequence",
)  # fmt: skip
"""What workers need that is slow to import. Not Ray: when its library is loaded it reads the environment, which has the
worker's job, and keeps what it has read."""


NAMESPACES = {"mnt": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "net": 0x40000000, "pid": 0x20000000, "time": 0x80}
"""Flags of ``setns`` (linux/sched.h)."""


def serve(door: socket.socket) -> None:
    """Fork a worker for each client, until standard input ends, with the process that has started this one."""
    ready, _, _ = select.select([door, sys.stdin], [], [])
    if door not in ready:
        return
    # Not before there is a client: then Ray is up, whose processes have 30 seconds for that.
    for name in LARGE:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"only a process of one thread can be forked; this one has {threads}"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    gc.collect()
    gc.freeze()  # a collection in a worker would copy all pages
    while True:
        ready, _, _ = select.select([door, sys.stdin], [], [])
        if door not in ready:
            return
        client, _ = door.accept()
        with client:
            if os.fork() == 0:
                door.close()
                _become_worker(client)
                return


def _become_worker(client: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _enter_namespaces(client)
    size, files, _, _ = socket.recv_fds(client, 8, 3)
    asked = bytearray()
    while len(asked) < int.from_bytes(size, "little"):
        asked += client.recv(1 << 16)
    wanted = json.loads(asked)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.setpgid(0, 0)  # as Ray has it
    os.chdir(wanted["directory"])
    os.environ.clear()
    os.environ.update(wanted["environment"])
    sys.argv = wanted["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    threading.Thread(target=_end_with, args=(client.detach(),), daemon=True).start()
    runpy.run_path(sys.argv[0], run_name="__main__")


def _enter_namespaces(client: socket.socket) -> None:
    """Be where the client is, as on one of the hosts of ``tests.hosts``."""
    pid, _, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if all(os.readlink(f"/proc/{pid}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES):
        return
    joined = os.pidfd_open(pid)
    if ctypes.CDLL(None, use_errno=True).setns(joined, sum(NAMESPACES.values())):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(joined)
    if os.fork():  # ids of processes and the clock are those of the namespace for what is forked from now on
        os._exit(0)


def _end_with(client: int) -> None:
    """End if the client does: Ray knows a worker that has not answered yet by the process that it has started."""
    os.read(client, 1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
