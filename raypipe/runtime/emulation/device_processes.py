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

import asyncio
import ctypes
import gc
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from raypipe.errors import RunError

PR_SET_PDEATHSIG = 1
"""Of ``man 2 prctl``: the signal that a process gets when its parent ends."""
RETURNED, RAISED = b"+", b"-"
"""First byte of an answer; then comes what was returned, or raised, pickled."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RES_OPTIONS": "attempts:0"}
"""Of a device's process: one thread, and no questions to a name server.

torch's store looks up the name of the address that it connects to, for its log. A hundred processes that ask at the
same time lose answers, and the C library asks again after 5 s; devices know one another by address and need no names.
"""


class Pickled:
    """A value that its holder has only as bytes; whoever receives it from there has the value itself."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self.data,)


class DeviceProcesses:
    """Starts the processes of emulated devices, and calls them: as an actor of Ray's, many of them with one call.

    A device's calls run in the order in which they are started. A thread reads the answers of all devices.

    Args:
        workers: per device, the arguments of its ``EmulatedWorker``: rank, title, and its node's id and address.
    """

    def __init__(self, workers: Sequence[tuple[int, str, str, str]]) -> None:
        self._titles = [title for _, title, _, _ in workers]
        pairs = [socket.socketpair() for _ in workers]
        self._connections = [Connection(own.detach()) for own, _ in pairs]
        theirs = [their.fileno() for _, their in pairs]
        self._forking = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, theirs)],
            stdin=subprocess.PIPE,
            pass_fds=theirs,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        for _, their in pairs:
            their.close()
        for connection, arguments in zip(self._connections, workers, strict=True):
            connection.send(arguments)
        self._lock = threading.Lock()
        self._called: list[deque[Future[Pickled]]] = [deque() for _ in workers]
        """Per device, the calls that it has not answered."""
        self._ended: set[int] = set()
        self._turn = 0
        self._early: dict[int, asyncio.Event] = {}
        threading.Thread(target=self._read, name="raypipe-devices", daemon=True).start()

    def start(self, device: int, request: bytes) -> Future[Pickled]:
        """Call a device's worker, ``request`` being the pickled name of a method and its arguments. One thread does so.

        Returns what will have the answer, or the error that was raised: RunError if the device's process has ended.
        """
        answer: Future[Pickled] = Future()
        with self._lock:
            self._called[device].append(answer)
            ended = device in self._ended
        if ended:
            self._end(device)
        else:
            with suppress(OSError):  # its process has ended, as the thread will see
                self._connections[device].send_bytes(request)
        return answer

    async def calls(self, turn: int, requests: Sequence[tuple[int, bytes]]) -> Any:
        """Call several devices, each with a request of its own; return their answers in this order.

        Args:
            turn: number of this call of ``calls``, from 0. Ray may begin calls of an actor in another order.
            requests: pairs of a device and what ``start`` takes.

        Returns:
            The answers; of one device, its answer alone, as Ray wants it.

        Raises:
            RunError: a device's process has ended.
        """
        if turn != self._turn:
            event = self._early[turn] = asyncio.Event()
            await event.wait()
        started = [self.start(*request) for request in requests]
        self._turn += 1
        if self._turn in self._early:
            self._early.pop(self._turn).set()
        # Raises the first error that comes: devices before the failed one may wait for it until their time is over.
        answers = await asyncio.gather(*map(asyncio.wrap_future, started))
        return answers if len(answers) > 1 else answers[0]

    def _read(self) -> None:
        """Hand every answer to the oldest open call of its device."""
        with selectors.DefaultSelector() as selector:
            for device, connection in enumerate(self._connections):
                selector.register(connection, selectors.EVENT_READ, device)
            while selector.get_map():
                for key, _ in selector.select():
                    try:
                        answer = self._connections[key.data].recv_bytes()
                    except (EOFError, OSError):
                        selector.unregister(key.fileobj)
                        self._end(key.data)
                        continue
                    with self._lock:
                        called = self._called[key.data].popleft()
                    if answer[:1] == RAISED:
                        called.set_exception(pickle.loads(answer[1:]))
                    else:
                        called.set_result(Pickled(answer[1:]))

    def _end(self, device: int) -> None:
        """Fail the open calls of a device whose process has ended."""
        with self._lock:
            self._ended.add(device)
            left = list(self._called[device])
            self._called[device].clear()
        for called in left:
            called.set_exception(
                RunError(self._titles[device], "its process has ended", "see whether the node ran out of memory")
            )


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
    import raypipe.runtime.emulation.emulated_worker as emulation

    emulation.set_up_device()  # what it loads and sets, devices have from here
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
