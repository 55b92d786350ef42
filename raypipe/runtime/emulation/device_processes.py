"""The processes of one node's emulated devices, all forked from one that has imported torch.

    python -m raypipe.runtime.emulation.device_processes SOCKET ...

Importing torch takes seconds of a core in every process that does it; a fork takes milliseconds, and shares the memory
of what is imported. So many devices start on a laptop, which as many actors of Ray's would not. An actor has threads
and must not fork, so it starts this module as a process of its own (``DeviceProcesses``), which imports, forks, and
then waits for the end of its standard input. With that it ends, and all devices with it.

A forked process serves its socket (the number of an open file): first come the arguments of an ``EmulatedWorker``, then
calls. The actor passes on what it need not understand, so it imports no torch either.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from raypipe.errors import RunError

PR_SET_PDEATHSIG = 1
"""Of ``man 2 prctl``: the signal that a process gets when its parent ends."""
RETURNED, RAISED = b"+", b"-"
"""First byte of an answer; then comes what was returned, or raised, pickled."""
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Pickled:
    """A value that its holder has only as bytes; whoever receives it from there has the value itself."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self.data,)


class DeviceProcesses:
    """Starts the processes of emulated devices, and calls them.

    Args:
        workers: per device, the arguments of its ``EmulatedWorker``: rank, title, and its node's id and address.
    """

    def __init__(self, workers: Sequence[tuple[int, str, str, str]]) -> None:
        self._titles = [title for _, title, _, _ in workers]
        pairs = [socket.socketpair() for _ in workers]
        self._connections = [Connection(own.detach()) for own, _ in pairs]
        theirs = [their.fileno() for _, their in pairs]
        self._forking = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, theirs)], stdin=subprocess.PIPE, pass_fds=theirs,
            env={**os.environ, **THREADS, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
        for _, their in pairs:
            their.close()
        for connection, arguments in zip(self._connections, workers, strict=True):
            connection.send(arguments)

    def call(self, device: int, request: bytes) -> Pickled:
        """Call a device's worker, ``request`` being the pickled name of a method and its arguments; raise its errors.

        Raises:
            RunError: the device's process has ended.
        """
        try:
            self._connections[device].send_bytes(request)
            answer = self._connections[device].recv_bytes()
        except (EOFError, ConnectionError):
            raise RunError(
                self._titles[device], "its process has ended", "see whether the node ran out of memory"
            ) from None
        if answer[:1] == RAISED:
            raise pickle.loads(answer[1:])
        return Pickled(answer[1:])


def serve(connection: Connection) -> None:
    """Make the worker of one device and answer its calls, until the other side closes the connection."""
    from raypipe.runtime.emulation.emulated_worker import EmulatedWorker

    with suppress(EOFError, ConnectionError):
        worker = EmulatedWorker(*connection.recv())
        while True:
            method, arguments = connection.recv()
            try:
                answer = RETURNED + pickle.dumps(getattr(worker, method)(*arguments))
            except Exception as error:
                answer = RAISED + _pickled(error)
            connection.send_bytes(answer)


def _pickled(error: Exception) -> bytes:
    """Pickle an error, or else one that says the same."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # some that can be pickled cannot be read again
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data


def fork_devices(sockets: Sequence[int]) -> None:
    """Fork a process for each socket, and end them when standard input ends."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)  # Ray starts processes at niceness 15
    import raypipe.runtime.emulation.emulated_worker  # noqa: F401

    gc.freeze()  # a collection in a device would write to the pages of what is imported, and so copy them
    children = []
    for number, one in enumerate(sockets):
        child = os.fork()
        if child == 0:
            try:
                _end_with_parent()
                for other in sockets[number + 1 :]:
                    os.close(other)
                serve(Connection(one))
            finally:
                os._exit(0)
        children.append(child)
        os.close(one)
    while os.read(sys.stdin.fileno(), 1):
        pass
    for child in children:
        os.kill(child, signal.SIGKILL)  # an ended one is a zombie until this process ends


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # it ended before
        os._exit(1)


if __name__ == "__main__":
    fork_devices([int(word) for word in sys.argv[1:]])
