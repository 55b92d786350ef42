"""The data and the programs of calls.

Data are sequences of any lengths, checked and put together as micro-batches. A micro-batch has as many sequences as the
plan says, and is padded to its longest one. Sequences of like length go together, so that little is computed for
nothing; what a call's last micro-batches lack is padding as well.

Programs follow from the plan's own schedule, for any number of micro-batches. A training step of a run is one program
with its gradient sums and updates at the end. Here the two are programs of their own: any number of calls adds to the
gradients, and then one sums them and updates.

The log of queued calls restores a session when a worker dies. Slots do not touch one another, so each has a log of its
own: what gave it its weights (a load, or a snapshot that was written after an update), and all that came since. New
workers do that again, and come to the same state, bit for bit: an update that a caller knows of is in it once, and a
call whose result was lost returns it after all.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ScheduleError, SpecError, nearest
from raypipe.files import short
from raypipe.plan.plan import Plan, build_schedule
from raypipe.runtime.session.token_losses import LOSSES, OWN, ROW, TARGETS, TOKENS, Options
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import BOOKKEEPING, KINDS
from raypipe.schedule.lowering.programs import Program, programs
from raypipe.schedule.lowering.safe_order import gpu_programs
from raypipe.schedule.passes import forwards_alone
from raypipe.search import search

MULTIPLE = 8
"""Micro-batches are padded to a multiple of so many positions, so that kernels and messages have few different shapes.
"""
PADDING = -1
"""Number of a sequence that is padding."""


class Datum(NamedTuple):
    """One sequence of a call."""

    tokens: NDArray[np.int64]
    """``[length]``."""
    inputs: Mapping[str, NDArray[Any]]
    """By name, ``[length]``: ``target_tokens``, and what the loss needs."""


class CallData(NamedTuple):
    """The micro-batches of one call, or of several that run together."""

    rows: Mapping[str, NDArray[Any]]
    """By raw input, one row per sequence: ``[rows, longest]``, or ``[rows]`` for ``ROW``."""
    lengths: tuple[int, ...]
    """Of every micro-batch."""
    order: tuple[int, ...]
    """The number of each row's sequence, over all calls; ``PADDING`` for none."""
    calls: tuple[int, ...] = ()
    """Of every micro-batch, the number of its call."""
    names: tuple[frozenset[str], ...] = ()
    """Of every call, its raw inputs."""


class Limits(NamedTuple):
    """The sequences and tokens that a model takes."""

    vocabulary: int
    longest: int
    """Positions of the longest sequence."""
    shortest: int = 1
    """Positions that a micro-batch has at least."""


def check(data: Sequence[Datum], loss: str, options: Options, limits: Limits) -> None:
    """Refuse a call that cannot run; a stage that failed in the middle of one would stop all others.

    Raises:
        SpecError: there is no such loss or option, or a sequence does not fit it or the model.
    """
    if loss not in LOSSES:
        raise SpecError("loss_fn", f'there is no loss "{short(loss)}"', nearest(loss, LOSSES))
    known = LOSSES[loss]
    for name, value in options.items():
        if name not in known.options:
            raise SpecError("loss_fn_config", f"{loss} has no option {short(name)}", nearest(name, known.options))
        if not np.isfinite(value):
            raise SpecError(f"loss_fn_config.{name}", f"{value} is no finite number", "use one")
    if not data:
        raise SpecError("data", "holds no sequence", "send at least one")
    for number, one in enumerate(data):
        where = f"data[{number}]"
        length = len(one.tokens)
        if not 1 <= length <= limits.longest:
            why = f"has {length} tokens; the model takes 1 to {limits.longest}"
            raise SpecError(where, why, "shorten it, or serve a job with a larger model.sequence")
        _check_tokens(f"{where}.model_input", one.tokens, limits.vocabulary)
        for name in sorted({TARGETS, *known.needs} - set(one.inputs)):
            raise SpecError(f"{where}.loss_fn_inputs", f"lacks {name}, which {loss} needs", f"add {name}")
        for name, values in one.inputs.items():
            if name != TARGETS and name not in known.takes:
                why = f"{loss} reads no {short(name)}"
                raise SpecError(f"{where}.loss_fn_inputs", why, nearest(name, {TARGETS, *known.takes}))
            if values.shape != (length,):
                why = f"has shape {list(values.shape)}, and the sequence {length} tokens"
                raise SpecError(f"{where}.loss_fn_inputs.{name}", why, "give one number for each token")
            if name != TARGETS and not np.isfinite(values).all():
                raise SpecError(
                    f"{where}.loss_fn_inputs.{name}", "holds a number that is not finite", "use finite ones"
                )
        _check_tokens(f"{where}.loss_fn_inputs.{TARGETS}", one.inputs[TARGETS], limits.vocabulary)
    given = [name for name in known.takes - known.needs if name in data[0].inputs]
    for name in sorted(known.takes - known.needs):
        if any((name in one.inputs) != (name in given) for one in data):
            raise SpecError("data", f"some sequences have {name}, and others not", "give it for all or for none")
    if len(given) == 1:
        raise SpecError("data", f"has {given[0]} alone", "give both thresholds for each token, or neither")


def _check_tokens(where: str, tokens: NDArray[Any], vocabulary: int) -> None:
    if tokens.dtype.kind not in "iu":
        raise SpecError(where, f"holds {tokens.dtype} values", "use whole numbers")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        wrong = tokens.min() if tokens.min() < 0 else tokens.max()
        raise SpecError(where, f"holds token {wrong}; the vocabulary has 0 to {vocabulary - 1}", "use its tokens")


def pack(data: Sequence[Datum], each: int, microbatches: int, limits: Limits, dtype: str) -> CallData:
    """Put sequences together as ``microbatches`` micro-batches of ``each``; ``dtype``: of what is no token."""
    longest_first = sorted(range(len(data)), key=lambda i: -len(data[i].tokens))
    order = [*longest_first, *[PADDING] * (each * microbatches - len(data))]
    lengths = []
    for begin in range(0, len(order), each):
        own = [len(data[i].tokens) for i in order[begin : begin + each] if i != PADDING]
        padded = -(-max(own, default=1) // MULTIPLE) * MULTIPLE
        lengths.append(max(limits.shortest, min(padded, limits.longest)))
    shape = (len(order), max(lengths))
    names = sorted(data[0].inputs)
    rows: dict[str, NDArray[Any]] = {
        name: np.zeros(shape, np.int64 if name in (TOKENS, TARGETS) else dtype) for name in (TOKENS, OWN, *names)
    }
    for row, number in enumerate(order):
        if number == PADDING:
            continue
        one = data[number]
        end = len(one.tokens)
        rows[TOKENS][row, :end], rows[OWN][row, :end] = one.tokens, 1
        for name in names:
            rows[name][row, :end] = one.inputs[name]
    rows[ROW] = np.array(order)
    return CallData(rows, tuple(lengths), tuple(order), (0,) * microbatches, (frozenset(rows),))


def together(parts: Sequence[CallData]) -> CallData:
    """Return the micro-batches of several calls as those of one, in their order."""
    if len(parts) == 1:
        return parts[0]
    longest = max(max(part.lengths) for part in parts)
    kinds = {name: values.dtype for part in parts for name, values in part.rows.items()}
    count = sum(len(part.order) for part in parts)
    rows = {name: np.zeros(count if name == ROW else (count, longest), kind) for name, kind in kinds.items()}
    lengths: list[int] = []
    order: list[int] = []
    calls: list[int] = []
    for number, part in enumerate(parts):
        at, sequences = len(order), sum(row != PADDING for row in order)
        for name, values in part.rows.items():
            if name != ROW:
                rows[name][at : at + len(part.order), : values.shape[1]] = values
        order += [row if row == PADDING else row + sequences for row in part.order]
        lengths += part.lengths
        calls += [number] * len(part.lengths)
    rows[ROW] = np.array(order)
    names = tuple(frozenset(part.rows) for part in parts)
    return CallData(rows, tuple(lengths), tuple(order), tuple(calls), names)


KEPT = 32
"""Orders, and programs of each kind, that are kept for the next call with as many micro-batches."""
TRIED = 64
"""Numbers of micro-batches that are tried from the wanted one upwards; Chimera wants a multiple of its devices."""
SEARCH_S = 0.3
"""Seconds to search an order for another number of micro-batches, where the plan's was searched too."""

Kind = Literal["forward", "backward", "update"]


class Key(NamedTuple):
    """The use of a program."""

    kind: Kind
    microbatches: int
    """Ids of the schedule, over all replicas; 0 for an update."""


class CallPrograms:
    """Makes and keeps the programs of a plan.

    Args:
        plan: the plan.
        batch: sequences of the step that the plan was made for.
        gpus: whether devices are GPUs, whose transfers then get an order that cannot deadlock.
    """

    def __init__(self, plan: Plan, batch: int, gpus: bool) -> None:
        self._plan, self._gpus = plan, gpus
        self._whole = build_schedule(plan, batch)
        self._orders: OrderedDict[int, Schedule] = OrderedDict()
        self._fits: dict[int, int] = {}

    @property
    def each(self) -> int:
        """Sequences of a micro-batch of the schedule."""
        return int(self._plan.parallel.microbatch * self._whole.share_of_samples)

    def fitting(self, sequences: int) -> int:
        """Return the least number of micro-batches that the schedule has an order for and that hold these sequences.

        Raises:
            ScheduleError: it has none of about that size.
        """
        wanted = -(-sequences // self._plan.parallel.microbatch)
        result = self._fits.get(wanted)
        if result is None:
            result = self._fits[wanted] = self._order(wanted).microbatches
        return result

    def _order(self, wanted: int) -> Schedule:
        """Return the compute tasks of all devices for at least ``wanted`` of the plan's micro-batches."""
        replicas = self._plan.parallel.replicas
        first = -(-wanted // replicas)
        for per_copy in range(first, first + TRIED):
            try:
                schedule = self._of(per_copy)
            except ScheduleError as error:
                refused = error
                continue
            self._orders[schedule.microbatches] = schedule
            if len(self._orders) > KEPT:
                self._orders.popitem(last=False)
            return schedule
        raise refused

    def _of(self, per_copy: int) -> Schedule:
        plan = self._plan
        parallel = plan.parallel
        order = None
        if parallel.schedule == "auto":
            present = plan.order()
            order = present
            if present.microbatches != per_copy:
                even = CostTable.even(present.stages)
                order = search(
                    present.placement, per_copy, even, graph=present.graph, budget_s=SEARCH_S, rules=present.rules
                ).schedule
        batch = per_copy * parallel.replicas * parallel.microbatch
        made = Plan.of(parallel, plan.cut, batch, order, plan.frozen)
        return build_schedule(made, batch).without(BOOKKEEPING)

    def programs(self, key: Key) -> list[Program]:
        """Return the program of each device for a call; the number of micro-batches is one of ``fitting``.

        Raises:
            ScheduleError: it could deadlock on GPUs.
        """
        if key.kind == "update":
            updates = self._whole.without(frozenset(KINDS) - {"AR", "U"})
            return programs(updates)
        schedule = self._orders.get(key.microbatches)
        if schedule is None:
            whole = key.microbatches * self._whole.share_of_samples
            schedule = self._order(int(whole))
        forwards, backwards = programs(forwards_alone(schedule)), programs(schedule)
        if self._gpus:
            safe, forwards = gpu_programs({(True, True): backwards}, forwards, schedule.microbatches, "flush", {})
            backwards = safe[True, True]
        return forwards if key.kind == "forward" else backwards


T = TypeVar("T")

Refs = list[Any]
"""References of the results of one call, by rank."""


class Restores(Protocol):
    """A session, as its calls know it."""

    lives: int
    """How often its workers were started anew."""

    def answers(self, refs: Refs, timeout_s: float) -> list[Any]:
        """Wait for what the workers return, at most so long after the last one that has answered."""

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
        timeout_s: how long a worker may take after the last one that has answered.
    """

    def __init__(
        self,
        session: Restores,
        issue: Callable[[], Refs],
        read: Callable[[list[Any]], T],
        changes: bool = True,
        base: bool = False,
        again: Callable[[], Refs] | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        self._session, self._issue, self._read, self._again = session, issue, read, again
        self.changes, self.base = changes, base
        self._timeout_s = timeout_s
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
                    parts = self._session.answers(self.refs, self._timeout_s)
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
        self.drop()

    def drop(self) -> None:
        """Drop the calls that the state no longer depends on."""
        base = 0
        for number, one in enumerate(self.calls):
            if one.base and one.done:
                base = number
            if not one.done:
                break
        self.calls = [one for one in self.calls[base:] if one.counts]
