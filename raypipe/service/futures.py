"""Requests that have been accepted: each has an id that follows from who asked, and runs once however often it comes.

A client numbers the requests to a model. They run in that order, also where they arrive in another, and a repeated one
is answered with the id of the first. What a request returns stays until it has been fetched for a while.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from raypipe.errors import RaypipeError, SpecError
from raypipe.runtime.session.call_data import Kind
from raypipe.runtime.session.session import Call

AHEAD = 256
"""Requests of a model that may be waiting, for the devices or for an earlier one."""
KEPT_S = 120.0
"""How long a result is kept once it has been fetched, as its answer may have been lost."""
SWEEP_S = 1.0
"""Between two looks for results that need not be kept any longer."""
RESTORED_S = 600.0
"""How long a result is kept that the server made before it was started anew, and whose client may not have it."""
MOST_BYTES = 1 << 30
"""Bytes of requests that wait and of results that are kept; beyond it, requests are told to come again."""


class BusyError(RaypipeError):
    """There is no room for another request now; whoever sent it should send it again later."""


class GoneError(RaypipeError):
    """There is no such session, model or request; it may have expired."""


class Queued(Protocol):
    """A call that has been queued with the workers."""

    def result(self) -> Any:
        """Wait for it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request: JSON, or protobuf."""

    json: dict[str, Any] | None = None
    protobuf: bytes = b""


Ended = Answer | BaseException
"""How a request has ended."""


@dataclass(slots=True)
class Accepted:
    """A request that has been accepted."""

    id: str
    """``OF:NUMBER``, of a model or a sampler."""
    session: str
    digest: str
    start: Callable[[], Queued]
    """Queues it with the workers."""
    finish: Callable[[Any], Answer]
    bytes: int
    record: Callable[[], None] = lambda: None
    """Writes down that it has been accepted; called before its client is told."""
    keep: Callable[[Ended], None] = lambda _: None
    """Writes down how it has ended; called before its client can ask for that."""
    joins: tuple[Kind, Call] | None = None
    """The call, if it can run together with others of its kind."""
    future: Future[Answer] = field(default_factory=Future)
    fetched_at: float | None = None

    @property
    def of(self) -> str:
        """Return the model or sampler."""
        return self.id.rpartition(":")[0]

    @property
    def number(self) -> int:
        """Return its number there."""
        return int(self.id.rpartition(":")[2])


@dataclass(slots=True)
class Line:
    """The requests of one model, in its client's order."""

    next: int = 1
    waiting: dict[int, Accepted | None] = field(default_factory=dict)
    """Those that came before one that is to run before them, by number; None for a number that was refused."""
    running: int = 0


def digest_of(*parts: bytes) -> str:
    """Return what tells a repeated request from another one with its number."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


class Requests:
    """Accepts requests, starts them in order, and keeps what they return.

    One thread starts them, which waits where the workers have enough to do; another waits for results. Where several
    models' requests wait, calls of one kind that are the next of their models start together.

    Args:
        failed: makes of an error what a client is told.
        wait: waits until another request should be started.
        together: starts calls together; all of them, or none where it fails.
    """

    def __init__(
        self,
        failed: Callable[[Exception], Exception],
        wait: Callable[[], None],
        together: Callable[[Kind, Sequence[Call]], Sequence[Queued]],
    ) -> None:
        self._failed, self._wait, self._together = failed, wait, together
        self._lines: dict[str, Line] = {}
        self._known: dict[str, Accepted] = {}
        self._bytes = self._aside = 0
        self._swept_at = 0.0
        self._lock = threading.Lock()
        self._to_start: queue.SimpleQueue[tuple[Line, Accepted] | None] = queue.SimpleQueue()
        self._started: queue.SimpleQueue[tuple[Line, Accepted, Queued] | None] = queue.SimpleQueue()
        for target in (self._start, self._collect):
            threading.Thread(target=target, name=f"raypipe-serve{target.__name__}", daemon=True).start()

    def close(self) -> None:
        """End the threads when what is queued has ended."""
        self._to_start.put(None)

    def close_lines(self, session: str, models: list[str]) -> None:
        """Forget a session's models and results; what it has queued runs to its end."""
        with self._lock:
            for model in models:
                self._lines.pop(model, None)
            for one in [one for one in self._known.values() if one.session == session]:
                self._forget(one)

    def accept(self, model: str, one: Accepted) -> str:
        """Accept a request of a model, or know it again; return its id.

        Raises:
            GoneError: there is no such model.
            SpecError: the number was given to another request, or is far from the next one.
            BusyError: too much is waiting.
        """
        with self._lock:
            line = self._line(model)
            if (known := self._known.get(one.id)) is not None:
                return self._again(known, one)
            number = one.number
            if number < line.next or number in line.waiting:
                raise SpecError(one.id, f"number {number} has been used, and its result fetched", "use the next number")
            if number >= line.next + AHEAD or len(line.waiting) + line.running >= AHEAD:
                raise BusyError(one.id, f"{AHEAD} requests of the model are waiting", "send it again later")
            self._keep(one)
            line.waiting[number] = one
            self._start_ready(line)
            return one.id

    def refuse(self, model: str, number: int, record: Callable[[], None]) -> None:
        """Note that a number was used for a request that cannot run, so that later ones do not wait for it.

        Raises:
            BusyError: the number is so far from the next one that it cannot be noted.
        """
        with self._lock:
            line = self._lines.get(model)
            if line is None or number < line.next or number in line.waiting:
                return
            if number >= line.next + AHEAD:
                raise BusyError(f"{model}:{number}", f"{AHEAD} requests come before it", "send it again later")
            record()
            line.waiting[number] = None
            self._start_ready(line)

    def _start_ready(self, line: Line) -> None:
        """Start the requests whose turn it is."""
        while line.next in line.waiting:
            ready = line.waiting.pop(line.next)
            line.next += 1
            if ready is not None:
                line.running += 1
                self._to_start.put((line, ready))

    def accept_first(self, model: str, one: Accepted) -> str:
        """Accept the request that makes a model; its line opens with it."""
        with self._lock:
            if (known := self._known.get(one.id)) is not None:
                return self._again(known, one)
            self._keep(one)
            line = self._lines[model] = Line(running=1)
            self._to_start.put((line, one))
            return one.id

    def restore(self, model: str, session: str, number: int, answers: Mapping[int, tuple[str, Ended]]) -> None:
        """Open the line of a model whose requests up to ``number`` have ended, with what ``answers`` returned."""
        with self._lock:
            self._lines[model] = Line(number + 1)
            for at, (digest, ended) in answers.items():
                one = Accepted(f"{model}:{at}", session, digest, _ended, _ended, 1024)
                one.fetched_at = time.monotonic() + RESTORED_S - KEPT_S
                if isinstance(ended, Answer):
                    one.future.set_result(ended)
                else:
                    one.future.set_exception(ended)
                self._keep(one)

    def keep_for(self, request_id: str, seconds: float) -> None:
        """Keep the result of a request for so long once it has ended, whether or not it is fetched."""
        one = self.find(request_id)

        def end(_: Future[Answer]) -> None:
            one.fetched_at = time.monotonic() + seconds - KEPT_S

        one.future.add_done_callback(end)

    def wait_for(self, model: str, number: int) -> int:
        """Wait for the requests of a model up to ``number``; return the first one whose result is kept."""
        with self._lock:
            kept = {one.number: one for one in self._known.values() if one.of == model and one.number}
        for one in kept.values():
            if one.number <= number:
                one.future.exception()
        return min(kept, default=number + 1)

    def accept_aside(self, one: Accepted, work: Callable[[], Answer], pool: ThreadPoolExecutor) -> str:
        """Accept a request that needs no worker, and run it in a pool of threads; return its id.

        Raises:
            SpecError: its number was given to another request.
            BusyError: too much is waiting.
        """
        with self._lock:
            if (known := self._known.get(one.id)) is not None:
                return self._again(known, one)
            self._keep(one)
            self._aside += 1
            if self._aside > AHEAD:
                self._aside -= 1
                self._forget(one)
                raise BusyError(one.id, f"{AHEAD} requests for samples are waiting", "send it again later")

        def run() -> None:
            try:
                result, error = work(), None
            except Exception as failed:
                result, error = None, failed
            with self._lock:
                self._aside -= 1
            self._end(Line(running=1), one, result, error)

        pool.submit(run)
        return one.id

    def then(self, start: Callable[[], Queued], model: str = "") -> None:
        """Queue what no client has asked for, after all that was accepted, and before what a model is asked for."""
        one = Accepted("", "", "", start, lambda _: Answer(), 0)
        with self._lock:
            line = self._lines.get(model, Line())
            line.running += 1
            self._to_start.put((line, one))

    def waiting(self, model: str) -> int:
        """Return how many requests of a model wait or run."""
        with self._lock:
            line = self._lines.get(model, Line())
            return len(line.waiting) + line.running

    def find(self, request_id: str) -> Accepted:
        """Return a request that was accepted.

        Raises:
            GoneError: there is none, or its result was fetched a while ago.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._swept_at > SWEEP_S:
                self._swept_at = now
                for old in [one for one in self._known.values() if one.fetched_at and now - one.fetched_at > KEPT_S]:
                    self._forget(old)
            found = self._known.get(request_id)
        if found is None:
            raise GoneError("request_id", "there is no such request, or its result was fetched before", "send it anew")
        return found

    def _line(self, model: str) -> Line:
        line = self._lines.get(model)
        if line is None:
            raise GoneError("model_id", "there is no such model, or its session has ended", "create another one")
        return line

    def _again(self, known: Accepted, one: Accepted) -> str:
        if known.digest != one.digest:
            raise SpecError(one.id, "another request was sent with this number", "use the next number")
        return known.id

    def _keep(self, one: Accepted) -> None:
        if self._bytes + one.bytes > MOST_BYTES:
            raise BusyError(one.id, "too many bytes are waiting", "send it again later")
        one.record()
        self._bytes += one.bytes
        self._known[one.id] = one

    def _forget(self, one: Accepted) -> None:
        self._bytes -= one.bytes
        del self._known[one.id]

    def _start(self) -> None:
        waiting: deque[tuple[Line, Accepted] | None] = deque()
        while (todo := waiting.popleft() if waiting else self._to_start.get()) is not None:
            self._wait()
            while not self._to_start.empty():
                waiting.append(self._to_start.get())
            group = [todo, *_joining(todo, waiting)]
            for other in group[1:]:
                waiting.remove(other)
            self._start_together(group)
        self._started.put(None)

    def _start_together(self, group: list[tuple[Line, Accepted]]) -> None:
        joins = [one.joins for _, one in group if one.joins is not None]
        if len(group) > 1:
            with suppress(Exception):  # of one of the calls, and none was queued; then each meets its own
                calls = self._together(joins[0][0], [call for _, call in joins])
                for (line, one), queued in zip(group, calls, strict=True):
                    self._started.put((line, one, queued))
                return
        for line, one in group:
            try:
                queued = one.start()
            except Exception as error:
                self._end(line, one, error=error)
            else:
                self._started.put((line, one, queued))

    def _collect(self) -> None:
        while (todo := self._started.get()) is not None:
            line, one, queued = todo
            try:
                result = one.finish(queued.result())
            except Exception as error:
                self._end(line, one, error=error)
                continue
            self._end(line, one, result)

    def _end(self, line: Line, one: Accepted, result: Answer | None = None, error: Exception | None = None) -> None:
        with self._lock:
            line.running -= 1
            held = one.bytes
            one.bytes = 1024 if result is None else 1024 + len(result.protobuf)
            if self._known.get(one.id) is one:
                self._bytes += one.bytes - held
        one.start, one.finish = _ended, _ended
        if result is not None:
            one.keep(result)
            one.future.set_result(result)
        else:
            assert error is not None
            told = self._failed(error)
            one.keep(told)
            one.future.set_exception(told)


def _joining(
    first: tuple[Line, Accepted], waiting: Iterable[tuple[Line, Accepted] | None]
) -> Iterator[tuple[Line, Accepted]]:
    """Return the requests that start together with the first: each the next one of another model, of its kind."""
    seen, joins = [first[0]], first[1].joins
    for other in waiting if joins is not None else ():
        if other is not None and not any(other[0] is line for line in seen):
            seen.append(other[0])
            if joins is not None and other[1].joins is not None and other[1].joins[0] == joins[0]:
                yield other


def _ended(*_: Any) -> Any:
    raise AssertionError("it has ended")
