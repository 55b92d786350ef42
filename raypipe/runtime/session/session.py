"""A session: the workers of a plan stay up, and calls from outside run on them in the order in which they come.

``forward`` returns the log-probability of every target, ``forward_backward`` adds gradients to those of the calls
before, ``optim_step`` updates. Calls are queued with the workers as steps of a run are, so that devices go from one to
the next without waiting for whoever called.
"""

from __future__ import annotations

import math
import shutil
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray

from raypipe.errors import SampleCountError, SpecError
from raypipe.files import write_whole
from raypipe.job.spec import JobSpec
from raypipe.models import build_model
from raypipe.plan.online.better_order import running_of
from raypipe.plan.plan import Plan
from raypipe.runtime.hosts.host_check import check_hosts
from raypipe.runtime.recovery.failure import shows_loss
from raypipe.runtime.session.call_data import (
    KEPT,
    CallData,
    CallPrograms,
    Datum,
    Key,
    Kind,
    Log,
    PendingCall,
    Refs,
    check,
    pack,
    together,
)
from raypipe.runtime.session.session_job import asked_of_workers, check_job, limits_of, mixes
from raypipe.runtime.session.session_worker import AdamW, CallOn, CallPart, WorkerUpdate
from raypipe.runtime.session.slots import Adapters
from raypipe.runtime.session.token_losses import NO_OPTIONS, Options
from raypipe.runtime.set_up_workers import setups_of
from raypipe.runtime.setup.communicators import check_devices
from raypipe.runtime.worker.worker_group import WorkerGroup

QUEUED = 8
"""Calls that are queued with the workers; whoever makes another one waits until the oldest has ended."""
INLINE_BYTES = 64 << 10
"""Data of a call that travels with it; larger data is put into Ray's object store once, for all workers."""

SNAPSHOT = 64
"""Calls of a slot after which its state is written, at an update, so that they need not be done again."""
MOST_LIVES = 100
"""How often workers may be started anew."""
KEPT_NAME = "kept-{slot}-{number}"
"""Folder of a snapshot, in the session's directory."""
NOTE = "note.json"
"""File of a snapshot with what its caller notes."""

T = TypeVar("T")
Note = Callable[[int], bytes]
"""From the number of updates in a snapshot to what is kept with it; called before the snapshot counts."""


class Call(NamedTuple):
    """A forward, with or without backward, of one slot."""

    data: Sequence[Datum]
    loss: str = "cross_entropy"
    options: Options = NO_OPTIONS
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of a call on data."""

    loss_sum: float
    """The loss, summed over all positions of all sequences."""
    logprobs: Sequence[NDArray[Any]]
    """Of each sequence, ``[length]``: the log-probability of each target."""


@dataclass(frozen=True, slots=True)
class Updated:
    """The outcome of an update."""

    step: int
    """Number of updates of its slot so far."""
    grad_norm: float
    """Global norm of the gradients, before clipping."""
    bubble_ratio: float
    """Share of the time since the update before, of whatever slot, in which devices computed nothing."""
    between_calls: float
    """Share of that time in which they had no call to run."""


class Session:
    """The calls on the workers of a plan.

    Calls name a slot: a model of its own, with weights, gradients and optimizer state (``slots``). Slot 0 begins with
    the job's start values; others are given weights by ``load`` first.

    Where a worker dies, all are started anew and do again what the calls have done (``pending``). So calls return what
    they would have returned, and an update is made once.

    Args:
        job: the job; of its ``train`` section the seed, ``dtype``, ``decay`` and time limits count.
        plan: the plan, for ``job.train.batch`` sequences.
        directory: one without prepared data; a call brings its own.
        workers: ``StageSession`` actors, one per rank.

    Raises:
        SpecError: sessions cannot run such a job.
    """

    def __init__(self, job: JobSpec, plan: Plan, directory: Path, workers: WorkerGroup) -> None:
        check_job(job, plan)
        self.job, self.plan, self.workers = asked_of_workers(job), plan, workers
        self.limits = limits_of(build_model(job, None, 0, plan.parallel), job)
        self.directory = directory
        self._programs = CallPrograms(plan, job.train.batch, not workers.on_cpus())
        self._known: OrderedDict[Key, None] = OrderedDict()
        self._queued: deque[PendingCall[Any]] = deque()
        self._lock = threading.RLock()
        self._calls = self.lives = 0
        kept = KEPT_NAME.format(slot="*", number="*")  # by a process that died
        for left in directory.glob(f".{kept}.partial"):
            shutil.rmtree(left, ignore_errors=True)
        earlier = directory.glob(kept)
        self._snapshots = max((int(folder.name.rpartition("-")[2]) for folder in earlier), default=0)
        self._logs: defaultdict[int, Log] = defaultdict(Log)
        self._begun = {0}
        """Slots that have weights; the first one those that the stages are built with."""
        self._updates: Counter[int] = Counter()
        self.mixes = mixes(job, plan.one_copy()) and plan.parallel.replicas == 1
        """Whether several calls can run in one pass."""
        self._gradients: set[int] = set()
        """Slots that have something to update with."""

    def set_up(self) -> list[int]:
        """Build the stages on the workers, and return how many parameters each has; call it before anything else.

        Raises:
            ClusterError: the nodes cannot run the job together.
        """
        workers, job = self.workers, self.job
        check_devices(workers.locations)
        check_hosts(
            workers.actors, workers.locations, timeout_s=job.train.message_timeout_s
        )  # there is no data to find
        running = running_of(self.plan, job.train.batch, clips=False)
        self.directory.mkdir(parents=True, exist_ok=True)
        setups = setups_of(workers, job, running, self.directory, None, False, 0, recovers=False, left_out=0)
        return [count for count, _ in ray.get(workers.call_each("setup", [(setup,) for setup in setups]))]

    def forward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", options: Options = NO_OPTIONS, slot: int = 0
    ) -> PendingCall[Outputs]:
        """Queue a forward; dropout draws nothing in it.

        Raises:
            SpecError: the data does not fit the loss or the model.
        """
        return self.together("forward", [Call(data, loss, options, slot)])[0]

    def forward_backward(
        self, data: Sequence[Datum], loss: str = "cross_entropy", options: Options = NO_OPTIONS, slot: int = 0
    ) -> PendingCall[Outputs]:
        """Queue a forward and backward, whose gradients are added to those since the last update.

        Raises:
            SpecError: the data does not fit the loss or the model.
        """
        return self.together("backward", [Call(data, loss, options, slot)])[0]

    def together(self, kind: Kind, calls: Sequence[Call]) -> list[PendingCall[Outputs]]:
        """Queue calls in one pass through the pipeline, where the plan ``mixes``, or else one after the other.

        Each micro-batch runs on the weights of its own call, so that calls of a few micro-batches each fill the
        pipeline together. Slots' gradients add up in the order of their micro-batches, as they do alone.

        Raises:
            SpecError: the data of a call does not fit its loss or the model; none is queued.
        """
        for one in calls:
            check(one.data, one.loss, one.options, self.limits)
        if len(calls) > 1 and not self.mixes:
            return [self.together(kind, [one])[0] for one in calls]
        self.wait_for_room()
        with self._lock:
            for one in calls:
                if one.slot not in self._begun:
                    raise SpecError("slot", f"{one.slot} has no weights yet", "load some first")
            refs = self._issue(kind, calls, together(self._packed([one.data for one in calls])))
            if kind == "backward":
                self._gradients.update(one.slot for one in calls)
            result, begin = [], 0
            for number, one in enumerate(calls):
                result.append(self._queue_one(kind, one, refs, number, begin))
                begin += len(one.data)
            return result

    def _packed(self, data: Sequence[Sequence[Datum]]) -> list[CallData]:
        """Return the micro-batches of calls, of which there are as many together as the schedule has an order for."""
        each = self._programs.each
        dtype = "float64" if self.job.train.dtype == "float64" else "float32"
        counts = [-(-len(one) // each) for one in data]
        counts[-1] += self._programs.fitting(sum(counts) * each if len(data) > 1 else len(data[0])) - sum(counts)
        return [pack(one, each, count, self.limits, dtype) for one, count in zip(data, counts, strict=True)]

    def _issue(self, kind: Kind, calls: Sequence[Call], data: CallData) -> Refs:
        """Queue a run of calls with the workers."""
        on = tuple(CallOn(one.slot, one.loss, dict(one.options)) for one in calls)
        size = sum(values.nbytes for values in data.rows.values())
        sent: Any = data if size <= INLINE_BYTES else ray.put(data)
        key = Key(kind, len(data.lengths))
        return self._run(key, lambda number: self.workers.call("run_calls", on, number, key, sent))

    def _queue_one(self, kind: Kind, call: Call, refs: Refs, number: int, begin: int) -> PendingCall[Outputs]:
        """Queue call ``number`` of a run, whose sequences are those from ``begin``; new workers run it alone."""
        at, first = [number, begin], [refs]

        def issue() -> Refs:
            if first:
                return first.pop()
            at[:] = 0, 0
            (alone,) = self._packed([call.data])
            return self._issue(kind, [call], alone)

        def read(parts: list[CallPart]) -> Outputs:
            return _outputs(call.data, parts, *at)

        return self._queue(call.slot, read, issue, kind == "backward", timeout_s=self.job.train.message_timeout_s)

    def optim_step(self, adam: AdamW, slot: int = 0, note: Note | None = None) -> PendingCall[Updated]:
        """Queue an update with the gradients of all calls since the last one.

        Args:
            adam: its numbers.
            slot: the slot.
            note: makes ``NOTE`` of the snapshot, if one is written after this update.

        Raises:
            SpecError: there are none, or a number is out of range.
        """
        check_adam(adam)
        self.wait_for_room()
        with self._lock:
            if slot not in self._gradients:
                raise SpecError("optim_step", "no forward_backward has come since the last one", "call it first")
            self._gradients.discard(slot)
            self._updates[slot] += 1
            key, step = Key("update", 0), self._updates[slot]

            def update(number: int) -> Refs:
                return self.workers.call("update", slot, number, key, adam)

            def read(parts: list[WorkerUpdate]) -> Updated:
                seconds = math.fsum(part.seconds for part in parts)
                idle, between = (
                    1 - math.fsum(each) / seconds
                    for each in ((part.computed_s for part in parts), (part.called_s for part in parts))
                )
                return Updated(step, math.sqrt(math.fsum(part.norm_squared for part in parts)), idle, between)

            timeout_s = self.job.train.message_timeout_s
            made = self._queue(slot, read, lambda: self._run(key, update), timeout_s=timeout_s)
            if len(self._logs[slot].calls) >= SNAPSHOT:
                self._snapshot(slot, note)
            return made

    def save(self, folder: Path, slot: int = 0) -> PendingCall[Path]:
        """Queue writing the weights and the optimizer's state into a folder, which is there when all is written; what
        was there before is replaced then."""
        self.wait_for_room()
        with self._lock:
            return self._queue(slot, *self._writing(folder, slot), changes=False)

    def _writing(
        self, folder: Path, slot: int, note: Note | None = None
    ) -> tuple[Callable[[list[Any]], Path], Callable[[], Refs]]:
        """Return what ends a save, and what queues it."""
        partial, updates = folder.with_name(f".{folder.name}.partial"), self._updates[slot]

        def whole(_: list[Any]) -> Path:
            if note is not None:
                write_whole(partial / NOTE, note(updates))
            shutil.rmtree(folder, ignore_errors=True)
            return partial.rename(folder)

        def issue() -> Refs:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            return self.workers.call("write_weights", slot, partial)

        return whole, issue

    def _snapshot(self, slot: int, note: Note | None = None) -> None:
        """Queue writing a slot's state, which has no gradients now, so that its log begins there."""
        self._snapshots += 1
        folder = self.directory / KEPT_NAME.format(slot=slot, number=self._snapshots)
        whole, issue = self._writing(folder, slot, note)

        def read(parts: list[Any]) -> Path:
            made = whole(parts)
            for old in self.directory.glob(KEPT_NAME.format(slot=slot, number="*")):
                if old != folder:
                    shutil.rmtree(old, ignore_errors=True)
            return made

        self._queue(slot, read, issue, base=True, again=lambda: self.workers.call("read_weights", slot, folder, True))

    def load(
        self,
        folder: Path,
        with_optimizer: bool,
        slot: int = 0,
        lasting: bool = False,
        updates: int | None = None,
        adapters: Adapters | None = None,
    ) -> PendingCall[None]:
        """Queue reading weights that ``save`` wrote; gradients since the last update are dropped.

        Args:
            folder: what ``save`` wrote.
            with_optimizer: whether to read the optimizer's state too.
            slot: the slot.
            lasting: whether nobody changes the folder until a snapshot that comes after it is whole.
            updates: of the slot so far; None for as many as were made here.
            adapters: the part of the job's adapters that the slot trains, where the folder has its start values; None
                for what the folder has.
        """
        self.wait_for_room()
        with self._lock:
            self._gradients.discard(slot)
            self._begun.add(slot)
            if updates is not None:
                self._updates[slot] = updates

            def issue() -> Refs:
                return self.workers.call("read_weights", slot, folder, with_optimizer, adapters)

            made = self._queue(slot, _nothing, issue, base=True)
            if not lasting:
                self._snapshot(slot)
            return made

    def free(self, slot: int) -> PendingCall[None]:
        """Queue giving up all that a slot has."""
        self.wait_for_room()
        with self._lock:
            self._gradients.discard(slot)
            self._begun.discard(slot)
            self._updates.pop(slot, None)
            return self._queue(slot, _nothing, lambda: self.workers.call("free", slot), base=True)

    def _queue(
        self,
        slot: int,
        read: Callable[[list[Any]], T],
        issue: Callable[[], Refs],
        changes: bool = True,
        base: bool = False,
        again: Callable[[], Refs] | None = None,
        timeout_s: float = math.inf,
    ) -> PendingCall[T]:
        """Queue a call; see ``PendingCall``. Files may take long, and not as long on all workers."""
        made = PendingCall(self, issue, read, changes, base, again, timeout_s)
        self._queued.append(made)
        self._logs[slot].add(made)
        return made

    def wait_for_room(self, most: int = QUEUED) -> None:
        """Wait until fewer than so many calls are queued. Whoever waits has no lock: workers may have to be started
        anew for the oldest one to end."""
        while len(self._queued) >= most:
            with suppress(Exception):  # whoever asks for its result gets the error; another thread may have taken it
                self._queued.popleft().result()

    def _run(self, key: Key, call: Callable[[int], Refs]) -> Refs:
        """Make a numbered call of all workers that runs a program, which they are told first where it is new."""
        if key not in self._known:
            made = self._programs.programs(key)
            self.workers.call_each("learn", [(key, program) for program in made])
            if len(self._known) >= 3 * KEPT:
                old, _ = self._known.popitem(last=False)
                self.workers.call("forget", old)
        self._known[key] = None
        self._known.move_to_end(key)
        number, self._calls = self._calls, self._calls + 1
        return call(number)

    def answers(self, refs: Refs, timeout_s: float) -> list[Any]:
        """Wait for what the workers return; see ``WorkerGroup.answers``."""
        return self.workers.answers(refs, timeout_s)

    def recover(self, error: Exception, lives: int) -> bool:
        """Start all workers anew after one has died, and have them do again what is in the logs.

        Returns False where the error is of another kind, or workers die too often.

        Raises:
            TransportError: the new workers do not start.
        """
        with self._lock:
            if self.lives != lives:  # another call has seen to it
                return True
            places, workers = self.workers.places, self.workers
            if not shows_loss(error) or places is None or self.lives >= MOST_LIVES:
                return False
            self.lives += 1
            for rank, actor in enumerate(workers.actors):
                ray.kill(actor)
                workers.actors[rank] = places.start(rank, workers.titles[rank], self.lives)
            workers.run_id = f"{workers.run_id.partition('.r')[0]}.r{self.lives}"
            workers.locate()
            self._known.clear()
            self.set_up()
            for log in self._logs.values():
                log.drop()  # a snapshot may have become whole, and the one before it is gone
                for call in log.calls:
                    if call.counts:
                        call.reissue()
            return True


def _nothing(_: list[Any]) -> None:
    """Make no result."""


def _outputs(data: Sequence[Datum], parts: Sequence[CallPart], number: int, begin: int) -> Outputs:
    """Return the outputs of call ``number`` of a run, whose sequences are those from ``begin``."""
    result = {row: values for part in parts for row, values in part.logprobs.items()}
    lost = [i for i in range(len(data)) if begin + i not in result]
    if lost:
        why = f"its loss covers {len(data) - len(lost)} sequences instead of {len(data)}"
        raise SampleCountError("a call", why, "this is a fault of raypipe: report it with the run's plan.json")
    logprobs = [result[begin + i][: len(one.tokens)] for i, one in enumerate(data)]
    return Outputs(math.fsum(part.loss_sums[number] for part in parts), logprobs)


def check_adam(adam: AdamW) -> None:
    """Raise SpecError where a number of an update is out of range."""
    values: Mapping[str, tuple[float, float, float]] = {
        "learning_rate": (adam.lr, 0.0, math.inf),
        "beta1": (adam.betas[0], 0.0, 1.0),
        "beta2": (adam.betas[1], 0.0, 1.0),
        "eps": (adam.eps, 0.0, math.inf),
        "weight_decay": (adam.weight_decay, 0.0, math.inf),
        "grad_clip_norm": (0.0 if adam.clip is None else adam.clip, 0.0, math.inf),
    }
    for name, (value, least, below) in values.items():
        if not least <= value < below:  # also where it is not a number
            raise SpecError(f"optim_step.{name}", f"is {value}", f"use a number from {least:g}, below {below:g}")


def arrays(tokens: Sequence[int], **inputs: Sequence[float]) -> Datum:
    """Make a sequence from Python's lists; ``target_tokens`` are whole numbers, all else is not."""
    result = {
        name: np.asarray(values, np.int64 if name == "target_tokens" else np.float64) for name, values in inputs.items()
    }
    return Datum(np.asarray(tokens, np.int64), result)
