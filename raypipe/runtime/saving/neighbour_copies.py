"""Copies of what each worker would save, in the memory of its node and the next: newer than the last checkpoint.

At each copy a worker copies its parameters and optimizer state as for a checkpoint, and a thread sends them to a
process of its own node and to one of the next node while training goes on. When those of all workers have arrived, the
copies before are dropped. A run that loses workers, or a whole node, has the newest complete copies written as a
checkpoint and goes on from that; so does one that loses its driver, whose copies an index keeps. Where all workers
are on one node, the loss of that node is not covered.

Source: Wang et al. 2023, GEMINI (SOSP), section 4, with two copies, and with nodes in a ring instead of groups.
"""

from __future__ import annotations

import itertools
import math
import pickle
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.checkpoint import ShardInfo
from raypipe.errors import CheckpointError, TransportError
from raypipe.observe.run_log import RunLog
from raypipe.runtime.executor.step import StepResult, Written
from raypipe.runtime.hosts.devices import physical_cores
from raypipe.runtime.hosts.node_files import SentShard, received
from raypipe.runtime.recovery.nonfinite import LEFT_OUT, NonFiniteError
from raypipe.runtime.saving.saves import RunCheckpoints
from raypipe.runtime.state.keeper import Keeper
from raypipe.runtime.state.shard_writer import KeptCopy, KeptShard, SaveBegun, shard_name, writes_of
from raypipe.runtime.worker.worker_group import WorkerGroup

NUMBERS = 1 << 32
"""Copies that each driver may number."""


@dataclass(slots=True)
class Copy:
    """The state after ``step`` steps, as far as the keepers have it."""

    number: int
    """Negative, since those of saves are not; later copies have smaller ones."""
    step: int
    left_out: int
    """Number of mini-batches of training data that were left out before."""
    nodes: list[tuple[str, ...]]
    """Of the keepers, by rank."""
    shards: dict[int, ShardInfo | None] = field(default_factory=dict)
    """By rank; None for a worker that saves nothing."""
    processor_s: float = 0.0
    """Processor time that it has taken so far."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The answer that a driver gets from the index when it begins."""

    first: int
    """The number of its first copy."""
    held: Copy | None
    """The newest complete copy."""
    under_way: tuple[Copy, ...]
    """Later ones that had begun; keepers may have them whole."""
    keepers: dict[str, Any]
    """By Ray's id of the node."""


class CopyIndex:
    """Knows which copies are complete, and the processes that hold them: an actor that outlives the driver.

    Ray ends an actor when the process that created it dies. So the process that starts the run creates the index, and
    the index creates the keepers: after the driver's death its successor finds both.
    """

    def __init__(self) -> None:
        self._drivers = 0
        self._held: Copy | None = None
        self._under_way: tuple[Copy, ...] = ()
        self._keepers: dict[str, Any] = {}

    def attach(self) -> Attached:
        """Serve another driver, whose numbers follow those of all before."""
        self._drivers += 1
        return Attached(-1 - (self._drivers - 1) * NUMBERS, self._held, self._under_way, dict(self._keepers))

    def keeper(self, node: str) -> Any:
        """Return the keeper of a node, which may have to start."""
        if node not in self._keepers:
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            self._keepers[node] = ray.remote(Keeper).options(num_cpus=0, scheduling_strategy=where).remote()
        return self._keepers[node]

    def lost(self, node: str) -> None:
        """Forget the keeper of a node, which is gone."""
        self._keepers.pop(node, None)

    def hold(self, copy: Copy, under_way: tuple[Copy, ...]) -> None:
        """Take in that a copy is complete, and which have begun since; the keepers drop those before it."""
        self._held, self._under_way = copy, under_way
        for keeper in self._keepers.values():
            keeper.drop_before.remote(copy.number)

    def forget(self) -> None:
        """Take in that the newest copies are not to be used any more."""
        self._held, self._under_way = None, ()


def start_index(**options: Any) -> Any:
    """Start an index on this node, which ends with this process; ``options`` are those of Ray's actors."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(CopyIndex).options(num_cpus=0, scheduling_strategy=here, **options).remote()


@contextmanager
def copies_kept(run_id: str, every: int | Literal["auto"]) -> Iterator[None]:
    """Keep the copies of a run that makes some while the block lasts, whatever becomes of its drivers."""
    if not every:
        yield
        return
    index = start_index(name=_name(run_id))
    try:
        yield
    finally:
        ray.kill(index)


def index_of(run_id: str) -> Any | None:
    """Return the index of a run; None if there is none."""
    try:
        return ray.get_actor(_name(run_id))
    except ValueError:
        return None


def _name(run_id: str) -> str:
    return f"copies · {run_id}"


ANSWER_S = 5.0
"""Time that a keeper has to answer."""
LOOK_S = 0.02
"""Interval at which it looks for copies that are arriving."""
START_S = 60.0
"""Time that an index has to answer, which may have to start on busy cores."""


FIRST = 8
"""Steps between copies with ``auto``, until one has been measured: as many as one call of the workers may have."""
SHARE = 0.02
"""Largest share of the time that copies may take from training."""
MEASURED = 5
"""Newest steps and copies of which the median counts."""


def interval(stall_s: float, seconds: float, step_s: float) -> int:
    """Return the steps between copies: the fewest with which they cost at most ``SHARE`` of the time, and arrive.

    Args:
        stall_s: seconds that a copy takes from training.
        seconds: from its beginning to when all of it has arrived.
        step_s: seconds of a step.

    >>> interval(stall_s=0.002, seconds=0.03, step_s=0.05)
    2
    >>> interval(stall_s=0.0001, seconds=0.16, step_s=0.05)
    4
    """
    return max(1, math.ceil(stall_s / (SHARE * step_s)), math.ceil(seconds / step_s))


class NeighbourCopies:
    """The copies of a run, as one driver makes them in all of its attempts.

    Args:
        every: steps between copies; 0 for none, ``auto``: as measured (``interval``).
        log: of the run.
        index: the run's index, with what drivers before this one have left; None for one of this driver's own.
    """

    def __init__(self, every: int | Literal["auto"], log: RunLog, index: Any | None = None) -> None:
        self._measures = every == "auto"
        self._every, self._log = FIRST if every == "auto" else every, log
        self._step_s: deque[float] = deque(maxlen=MEASURED)
        """Of the newest steps."""
        self._stall_s: deque[float] = deque(maxlen=MEASURED)
        """Seconds in which the slowest worker could not train, for the newest copies."""
        self._taken_s: deque[float] = deque(maxlen=MEASURED)
        """Seconds that they took from all cores of a node, where these train."""
        self._index, self._own = index, index is None
        self._keepers: dict[str, Any] = {}
        """By Ray's id of the node."""
        self._numbers = itertools.count(-1, -1)
        self._under_way: dict[int, Copy] = {}
        self._began: dict[int, float] = {}
        """By number of the copies under way."""
        self._held: Copy | None = None
        self._on_cpus = False
        """Whether devices are CPUs, which a copy takes from training."""
        if not every:
            return
        try:
            known: Attached = ray.get((index or self._start_index()).attach.remote(), timeout=START_S)
        except RayError:
            self._follow_index()
        else:
            self._keepers, self._held, self._numbers = known.keepers, known.held, itertools.count(known.first, -1)
            self._under_way = {copy.number: copy for copy in known.under_way}

    def _start_index(self) -> Any:
        """Start an index that ends with this driver."""
        self._index, self._own = start_index(), True
        return self._index

    def _follow_index(self) -> None:
        """Begin with another index, because the one that there was is gone, and with it all keepers."""
        self._log.event("notice", message="the process that knew the run's copies is gone; another follows")
        self._start_index()
        self._keepers.clear()
        self.forget()

    def took(self, step_s: float) -> None:
        """Note how long a step took, in seconds."""
        self._step_s.append(step_s)

    @property
    def made(self) -> bool:
        """Return whether the run makes any."""
        return bool(self._every)

    def due(self, done: int) -> bool:
        """Return whether to copy the state after ``done`` steps."""
        return bool(self._every) and done % self._every == 0

    def call(self, workers: WorkerGroup, step: int, left_out: int) -> list[Any]:
        """Have all workers begin to copy their state after the steps that are queued; return the references."""
        nodes = keeping_nodes([at.peer.node for at in workers.locations])
        self._on_cpus = workers.on_cpus()
        keepers = [[self._keeper(node) for node in both] for both in nodes]
        copy = Copy(next(self._numbers), step, left_out, nodes)
        self._under_way[copy.number] = copy  # calls are queued ahead, so there may be earlier ones
        self._began[copy.number] = time.monotonic()
        return workers.call_each("copy", [(copy.number, both) for both in keepers])

    def _keeper(self, node: str) -> Any:
        if node not in self._keepers:
            try:
                self._keepers[node] = self._started(node)
            except RayError:
                self._follow_index()
                self._keepers[node] = self._started(node)
        return self._keepers[node]

    def _started(self, node: str) -> Any:
        assert self._index is not None
        return ray.get(self._index.keeper.remote(node), timeout=START_S)

    def begun(self, step: int, results: Iterable[SaveBegun]) -> None:
        """Take in that all workers have begun a copy.

        Raises:
            NonFiniteError: a parameter or an optimizer state is not finite.
        """
        results = list(results)
        self._stall_s.append(max((one.stall_s - one.waited_s for one in results), default=0.0))
        self.heard(results)
        broken = next((r.broken for r in results if r.broken is not None), None)
        if broken is not None:
            self._under_way.clear()
            raise NonFiniteError(step, f"{broken} is not finite after the update")

    def heard(self, results: Iterable[StepResult | SaveBegun | Written | None]) -> None:
        """Take in what workers report to have sent."""
        for one in writes_of(results):
            if (copy := self._under_way.get(one.number)) is not None:
                self._arrived(copy, one)

    def _arrived(self, copy: Copy, one: Written) -> None:
        if one.lost:
            for node in copy.nodes[one.rank]:
                self._look_after(node)
            if one.shard is None:
                del self._under_way[copy.number]
                return
        assert one.shard is None or isinstance(one.shard, ShardInfo)
        copy.shards[one.rank] = one.shard
        copy.processor_s += one.processor_s
        if len(copy.shards) == len(copy.nodes):
            self._held = copy
            self._under_way = {number: one for number, one in self._under_way.items() if one.step > copy.step}
            assert self._index is not None
            self._index.hold.remote(copy, tuple(self._under_way.values()))
            seconds = time.monotonic() - self._began[copy.number]
            self._taken_s.append(copy.processor_s / len(set(copy.nodes)) / physical_cores() if self._on_cpus else 0.0)
            stall_s = median(self._stall_s) if self._stall_s else 0.0
            if self._measures and self._step_s:
                self._every = interval(stall_s + median(self._taken_s), seconds, median(self._step_s))
            size = sum(shard.bytes for shard in copy.shards.values() if shard is not None)
            fields = {"seconds": seconds, "stall_s": stall_s, "bytes": size, "every": self._every}
            fields["processor_s"] = copy.processor_s
            self._log.event("copied", step=copy.step, **fields)
            self._began = {number: self._began[number] for number in self._under_way}

    def _look_after(self, node: str) -> None:
        """Have another keeper started with the next copy where the one of a node is gone."""
        if node not in self._keepers:  # several copies were under way to it
            return
        try:
            ray.get(self._keepers[node].lives.remote(), timeout=ANSWER_S)
        except RayError:
            self.lost(node)

    def lost(self, node: str) -> None:
        """Take in that a node, or its keeper, is gone: whoever waits for that one stops."""
        if (keeper := self._keepers.pop(node, None)) is not None:
            ray.kill(keeper)
            assert self._index is not None
            self._index.lost.remote(node)
            self._log.event("notice", message=f"the process that held copies on node {node} is gone; another follows")

    def forget(self) -> None:
        """Use none of the copies any more, because the run goes another way."""
        self._held = None
        self._under_way.clear()
        if self._index is not None:
            self._index.forget.remote()

    def restore(self, checkpoints: RunCheckpoints, newest: int, most: float = math.inf) -> bool:
        """Write the newest copies as a checkpoint, if they are of more steps than ``newest``; return whether they are.

        ``most``: the steps that are logged; none of them is repeated where keepers have the copy of the last one. Where
        that fails a notice says so, and the run goes on from the checkpoint that there is.
        """
        self._arriving(most, ())
        self._under_way.clear()
        held = self._held
        if held is None or held.step <= newest:
            return False
        began = time.monotonic()
        checkpoints.left_out = held.left_out
        folder = checkpoints.folder(held.step)
        try:
            shards = [received(folder, SentShard(one.info, one.blocks())) for one in self._kept(held)]
            checkpoints.commit(held.step, shards, None, is_best=False)
        except (RayError, CheckpointError, TransportError) as error:
            self._held = None
            checkpoints.delete(folder)
            why = str(error).partition("\n")[0]
            self._log.event("notice", message=f"the copies of step {held.step} are lost: {why}")
            return False
        checkpoints.committed(held.step, {}, False, 0.0, time.monotonic() - began)
        return True

    def _kept(self, copy: Copy) -> list[KeptShard]:
        """Return a complete copy's shards, with those of its keepers that there still are."""
        result = []
        for rank, info in sorted(copy.shards.items()):
            if info is not None:
                keepers = tuple(self._keepers[node] for node in copy.nodes[rank] if node in self._keepers)
                result.append(KeptShard(copy.number, info, keepers))
        return result

    def newest(self, most: int, dead: Collection[int]) -> KeptCopy | None:
        """Return the newest complete copy of at most ``most`` steps, for devices to go on with; None if there is none.

        Keepers say what has arrived, so that the shard of a worker counts that died before it could report it; what
        those that live are sending is waited for, where the ``dead`` ranks have sent theirs.
        """
        deadline = time.monotonic() + ANSWER_S
        while self._arriving(most, dead) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        self._under_way.clear()
        if self._held is None or self._held.step > most:
            return None
        assert self._index is not None
        self._index.hold.remote(self._held, ())
        meta = {LEFT_OUT: self._held.left_out} if self._held.left_out else {}
        return KeptCopy.of(self._held.step, meta, self._kept(self._held))

    def _arriving(self, most: float, dead: Collection[int]) -> bool:
        """Hold the newest copy that is complete; return whether a newer one may become so."""
        arrived: dict[int, dict[str, ShardInfo]] = {}
        for asked in [keeper.whole.remote() for keeper in self._keepers.values()]:
            try:
                for number, shards in ray.get(asked, timeout=ANSWER_S).items():
                    told = {name: pickle.loads(info) for name, info in shards.items()}
                    arrived.setdefault(number, {}).update(told)
            except RayError:
                continue  # its node may be gone
        nothing = () if self._held is None else (rank for rank, one in self._held.shards.items() if one is None)
        empty: dict[int, ShardInfo | None] = dict.fromkeys(nothing)
        later = False
        for copy in sorted(self._under_way.values(), key=lambda one: one.step):
            if copy.step > most:
                break
            there = arrived.get(copy.number, {})
            named = {rank: there.get(shard_name(rank)) for rank in range(len(copy.nodes))}
            copy.shards = {**empty, **{rank: one for rank, one in named.items() if one is not None}, **copy.shards}
            if len(copy.shards) == len(copy.nodes):
                self._held, later = copy, False
            else:
                later = later or copy.shards.keys() >= set(dead)
        return later

    def __enter__(self) -> NeighbourCopies:
        return self

    def __exit__(self, *_: object) -> None:
        if self._own and self._index is not None:
            ray.kill(self._index)  # and with it the keepers
        self._keepers.clear()


def keeping_nodes(nodes: list[str]) -> list[tuple[str, ...]]:
    """Return for each worker its own node and the one after it, in the order in which they first appear.

    >>> keeping_nodes(["a", "a", "b"])
    [('a', 'b'), ('a', 'b'), ('b', 'a')]
    >>> keeping_nodes(["a", "a"])
    [('a',), ('a',)]
    """
    order = list(dict.fromkeys(nodes))
    after = {node: order[(at + 1) % len(order)] for at, node in enumerate(order)}
    return [tuple(dict.fromkeys((node, after[node]))) for node in nodes]
