"""SIGTERM and SIGINT (Ctrl-C): the first one ends a command in order, a second one at once.

While a run trains, the first one asks it for a checkpoint, and the exception follows when that is there. At any other
time it is raised where the command is, or when Ray has started. The exit status is 143 or 130, as shells have it.
Where what a run waits for is gone, a thread ends the command (``ends_without``), since no handler may run any more.
Processes that a command starts beside itself (``start_apart``, ``fork_apart``) get none of them, and end with it. A
worker that trains only notes a SIGTERM (``told_to_go``), and goes between two steps.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from types import FrameType

from raypipe.errors import InterruptionError, TerminationError

HANDLED = (signal.SIGTERM, signal.SIGINT)
SHELL = 128
"""What shells add to a signal's number to make the exit status of a process that it ended."""


class Terminated(SystemExit):
    """SIGTERM ended it. Exit status 143."""

    def __init__(self, message: str = "ended by SIGTERM") -> None:
        super().__init__(SHELL + signal.SIGTERM)
        self.message = message


class Interrupted(KeyboardInterrupt):
    """SIGINT, as of Ctrl-C, ended it. Exit status 130."""

    def __init__(self, message: str = "interrupted") -> None:
        super().__init__(message)
        self.message = message


OURS = (Terminated, Interrupted, TerminationError, InterruptionError)


class _Handlers:
    """The handler of this process's signals; ``received`` is the first one, ``raised`` if not only noted."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.raised = False
        self.waits = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(SHELL + number)  # the processes of a Ray started here end with their parent
        self.received = number
        if not self.waits:
            self.raised = True
            raise ended_by(number)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Have this block end with the exception of the signal, where others have put their own in its place.

        Ray's core does, where it waits (``SystemExit(1)``), as do modules of C++ that are being imported (ImportError).
        """
        try:
            yield
        except BaseException as error:
            if self.received is None or not self.raised or isinstance(error, OURS):
                raise
            raise ended_by(self.received) from None


_told: list[int] = []


def told_to_go() -> bool:
    """Return whether this process has had a SIGTERM. From the first call on one is only noted; a second one ends it.

    A thread other than the main one cannot have that, and is told nothing.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is not _note:
        signal.signal(signal.SIGTERM, _note)
    return bool(_told)


def _note(number: int, _frame: FrameType | None) -> None:
    if _told:
        os._exit(SHELL + number)
    _told.append(number)


def start_apart(program: str, given: bytes = b"") -> subprocess.Popen[bytes] | None:
    """Start Python with a program that prepares something for this process, and ends with it.

    Args:
        program: its code.
        given: its standard input.

    Returns:
        None if no process can be started, or this is an interpreter within another program.
    """
    quiet = subprocess.DEVNULL
    # A session of its own: Ctrl-C in a terminal is not for it.
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        )
    except OSError:
        return None
    atexit.register(process.kill)
    assert process.stdin is not None
    with suppress(OSError), process.stdin:  # it may have ended already
        process.stdin.write(given)
    return process


def fork_apart(work: Callable[[], object]) -> Callable[[], bool] | None:
    """Fork this process for work that prepares something for it, and ends with it; what is imported is so there too.

    The work may not use OpenMP's threads (``torch.set_num_threads(1)``): GNU's waits for ever for those that this
    process has had.

    Returns:
        A function that returns whether it has ended. None where a fork is not safe: beside threads of Python's or
        Ray's, which may hold locks, and on other systems than Linux, whose libraries may not bear it.
    """
    if sys.platform != "linux" or threading.active_count() > 1 or "ray" in sys.modules:
        return None
    process = get_context("fork").Process(target=_work_apart, args=(work,), daemon=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of any thread; those of NumPy's BLAS bear a fork
            process.start()
    except OSError:
        return None
    atexit.register(process.kill)
    return lambda: process.exitcode is not None


def _work_apart(work: Callable[[], object]) -> None:
    for number in HANDLED:
        signal.signal(number, signal.SIG_DFL)
    os.setsid()  # Ctrl-C in a terminal is not for it
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    work()


LOOKS, LOOK_S = 3, 1.0
"""Times in a row that what a run waits for has to be gone, and the interval between them."""


@contextmanager
def ends_without(there: Callable[[], bool], say: Callable[[int], str]) -> Iterator[None]:
    """Have a signal in this block end the process when what the block waits for is gone; a second one does at once.

    Python runs handlers between two of its instructions, but a call of Ray's whose cluster is gone may not return for
    a minute. So a thread of this block's own hears of signals.

    Args:
        there: returns whether what the block waits for is there; it is asked from a signal on.
        say: returns the last words, from the signal's number.
    """
    ours = [number for number in HANDLED if isinstance(signal.getsignal(number), _Handlers)]
    if threading.current_thread() is not threading.main_thread() or not ours:
        yield
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    threading.Thread(target=_end_without, args=(heard, ours, there, say), name="raypipe-signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(told)


def _end_without(heard: int, ours: list[int], there: Callable[[], bool], say: Callable[[int], str]) -> None:
    with os.fdopen(heard, "rb", buffering=0) as pipe:
        numbers: list[int] = []
        gone = 0
        while gone < LOOKS and len(numbers) < 2:
            if select.select([pipe], [], [], LOOK_S if numbers else None)[0]:
                if not (data := pipe.read(64)):
                    return  # the block has ended
                numbers += [number for number in data if number in ours]
            elif numbers:
                gone = 0 if there() else gone + 1
        print(say(numbers[0]), file=sys.stderr, flush=True)
        os._exit(SHELL + numbers[0])


_active: _Handlers | None = None


def ended_by(number: int, message: str = "") -> Terminated | Interrupted:
    """Return the exception for a signal."""
    kind = Terminated if number == signal.SIGTERM else Interrupted
    return kind(message) if message else kind()


@contextmanager
def end_on_signals() -> Iterator[None]:
    """Handle both signals as this module says, where they have no handler of the user's; contexts may be nested.

    Only a process's main thread can have handlers, so in another one nothing changes.
    """
    global _active
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _active is not None:
        with _active.told():
            yield
        return
    _active = _Handlers()
    before = {number: signal.getsignal(number) for number in HANDLED}
    ours = [number for number, handler in before.items() if _replaceable(handler)]
    for number in ours:
        signal.signal(number, _active)
    try:
        with _active.told():
            yield
    finally:
        for number in ours:
            signal.signal(number, before[number] or signal.SIG_DFL)
        _active = None


@contextmanager
def waiting() -> Iterator[Callable[[], int | None]]:
    """Have the first signal only be noted in this block, which has to look for it: yields what returns its number."""
    handlers = _active or _Handlers()
    before, handlers.waits = handlers.waits, True
    try:
        yield lambda: handlers.received
    finally:
        handlers.waits = before


@contextmanager
def enough_by_interrupt() -> Iterator[Callable[[], bool]]:
    """On a terminal, have Ctrl-C say that this block has done enough: yields what returns whether it has.

    The command goes on then, and the next Ctrl-C ends it; a second one in the block ends it at once. Elsewhere, as for
    SIGTERM, nothing changes.
    """
    if _active is None or not sys.stdin.isatty():
        yield lambda: False
        return
    handlers = _active

    def enough() -> bool:
        if handlers.received not in (None, signal.SIGINT):
            raise ended_by(handlers.received)
        return handlers.received is not None

    with waiting():
        yield enough
    if enough():
        handlers.received = None


@contextmanager
def held() -> Iterator[None]:
    """Have the first signal wait until this block is over, because what is in it must not be left half done."""
    with waiting() as received:
        try:
            yield
        finally:
            if (number := received()) is not None:
                raise ended_by(number)


def _replaceable(handler: object) -> bool:
    """Return whether a handler is not the user's: Python's own, or Ray's."""
    if handler in (None, signal.SIG_DFL, signal.default_int_handler):
        return True
    return str(getattr(handler, "__module__", "")).startswith("ray.")
