"""Calls that were queued, and the log of them from which a session is restored when a worker dies.

Slots do not touch one another, so each has a log of its own: what gave it its weights (a load, or a snapshot that was
written after an update), and all that came since. New workers do that again, and come to the same state, bit for bit:
an update that a caller knows of is in it once, and a call whose result was lost returns it after all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import ray

T = TypeVar("T")

Refs = list[Any]
"""References of the results of one call, by rank."""


class Restores(Protocol):
    """A session, as its calls know it."""

    lives: int
    """How often its workers were started anew."""

    def recover(self, error: Exception, lives: int) -> bool:
        """Start the workers anew after an error, unless that was done since ``lives``; return False if nothing can be
        done about it."""


class PendingCall(Generic[T]):
    """A call that has been queued.

    Args:
        session: whose workers it was queued with.
        issue: queues it, and queues it again.
        read: makes its result of what the workers return.
        changes: whether it changes a slot's state.
        base: whether the state after it depends on nothing before it.
        again: queues what comes to the same once it has ended; None for ``issue``.
    """

    def __init__(
        self,
        session: Restores,
        issue: Callable[[], Refs],
        read: Callable[[list[Any]], T],
        changes: bool = True,
        base: bool = False,
        again: Callable[[], Refs] | None = None,
    ) -> None:
        self._session, self._issue, self._read, self._again = session, issue, read, again
        self.changes, self.base = changes, base
        self.refs = issue()
        self._once = threading.Lock()
        self._ended: list[T] = []
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Return whether its result is known."""
        return bool(self._ended) or self._error is not None

    @property
    def counts(self) -> bool:
        """Return whether new workers have to do it again."""
        return self._error is None and (self.changes or not self._ended)

    def reissue(self) -> None:
        """Queue it again, with new workers."""
        again = self._again if self._ended and self._again is not None else self._issue
        self.refs = again()

    def result(self) -> T:
        """Wait for the call, and return its result.

        Raises:
            ray.exceptions.RayError: it failed, or workers die again and again.
        """
        with self._once:
            if self._error is not None:
                raise self._error
            while not self._ended:
                lives = self._session.lives
                try:
                    parts = ray.get(self.refs)
                except Exception as error:
                    if not self._session.recover(error, lives):
                        self._error = error
                        raise
                else:
                    self._ended.append(self._read(parts))
            return self._ended[0]


class Log:
    """The calls of one slot that new workers have to do again."""

    def __init__(self) -> None:
        self.calls: list[PendingCall[Any]] = []

    def add(self, call: PendingCall[Any]) -> None:
        """Add the newest call, and drop what its state no longer depends on."""
        self.calls.append(call)
        base = 0
        for number, one in enumerate(self.calls):
            if one.base and one.done:
                base = number
            if not one.done:
                break
        self.calls = [one for one in self.calls[base:] if one.counts]
