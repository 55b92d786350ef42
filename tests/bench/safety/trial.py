"""Try one input: taken, refused by one clear error, or a defect (traceback, hang, taken although it is wrong)."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeVar

from raypipe.errors import RaypipeError

LIMIT_S = 10.0
"""Longest that a processor may work on one input."""
WAIT = 6
"""How many times as long reading it may take where the process also waits, on a machine that others use too."""
Verdict = Literal["taken", "refused", "traceback", "hang", "silent"]
DEFECTS: tuple[Verdict, ...] = ("traceback", "hang", "silent")
Input = TypeVar("Input")


class SilentError(Exception):
    """An input was taken that an independent check finds wrong."""


class Hang(BaseException):
    """An input took longer than ``LIMIT_S``; no code catches it."""


class Outcome(NamedTuple):
    """What became of an input."""

    verdict: Verdict
    why: str = ""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise ``Hang`` in the main thread if the block computes longer, or takes ``WAIT`` times as long."""

    def ring(*_: object) -> None:
        raise Hang

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, WAIT * seconds))
    before = [signal.signal(bell, ring) for bell, _, _ in timers]
    for _, timer, limit in timers:
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for (bell, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0.0)
            signal.signal(bell, handler)


def attempt(read: Callable[[Input], None], given: Input) -> Outcome:
    """Read an input; an error of raypipe's that says where and why is a refusal, all else is a defect."""
    try:
        with at_most(LIMIT_S):
            read(given)
    except RaypipeError as error:
        clear = bool(error.why.strip()) and len(str(error)) < 2000 and "Traceback" not in str(error)
        return Outcome("refused") if clear else Outcome("traceback", f"an unclear error: {str(error)[:300]}")
    except SilentError as error:
        return Outcome("silent", str(error))
    except Hang:
        return Outcome("hang", traceback.format_exc(limit=-6))
    except BaseException:
        return Outcome("traceback", traceback.format_exc(limit=-8))
    return Outcome("taken")


def expect(right: bool, what: str) -> None:
    """Say what is wrong with an input that was taken.

    Raises:
        SilentError: it is not right.
    """
    if not right:
        raise SilentError(what)
