"""SIGTERM and SIGINT (Ctrl-C): the first one ends a command in order, a second one at once.

While a run trains, the first one asks it for a checkpoint, and the exception follows when that is there. At any other
time it is raised where the command is. The exit status is 143 or 130, as shells have it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

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


class _Handlers:
    """What this process does about signals; ``received`` is the first one."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.waits = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(SHELL + number)  # the processes of a Ray started here end with their parent
        self.received = number
        if not self.waits:
            raise_for(number)


_active: _Handlers | None = None


def raise_for(number: int, message: str = "") -> NoReturn:
    """Raise the exception for a signal.

    Raises:
        Terminated: it is SIGTERM.
        Interrupted: it is SIGINT.
    """
    kind = Terminated if number == signal.SIGTERM else Interrupted
    raise kind(message) if message else kind()


@contextmanager
def end_on_signals() -> Iterator[None]:
    """Handle both signals as this module says, where they have no handler of the user's; contexts may be nested.

    Only a process's main thread can have handlers, so in another one nothing changes.
    """
    global _active
    if _active is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _active = _Handlers()
    before = {number: signal.getsignal(number) for number in HANDLED}
    ours = [number for number, handler in before.items() if _replaceable(handler)]
    for number in ours:
        signal.signal(number, _active)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number] or signal.SIG_DFL)
        _active = None


@contextmanager
def waiting() -> Iterator[Callable[[], int | None]]:
    """Have the first signal only be noted in this block, which has to look for it: yields what returns its number."""
    handlers = _active or _Handlers()
    handlers.waits = True
    try:
        yield lambda: handlers.received
    finally:
        handlers.waits = False


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
            raise_for(handlers.received)
        return handlers.received is not None

    with waiting():
        yield enough
    if enough():
        handlers.received = None


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Keep all handlers while Ray starts, which installs two of its own.

    One of them is below Python and prints a stack of C++ on SIGTERM; installing ours again replaces it also.
    """
    before = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler not in (None, signal.SIG_DFL):
                    signal.signal(number, handler)


def _replaceable(handler: object) -> bool:
    """Whether a handler is not the user's: Python's own, or Ray's."""
    if handler in (None, signal.SIG_DFL, signal.default_int_handler):
        return True
    return str(getattr(handler, "__module__", "")).startswith("ray.")
