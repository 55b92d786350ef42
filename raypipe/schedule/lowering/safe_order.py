"""Order the transfers of programs such that GPUs cannot deadlock, even where one transfer at a time may wait.

Programs alone say: send right after the task, receive right before the task that needs it. With one hardware queue
that deadlocks: in 1F1B, two neighbours send to each other, and each send waits for a receive that the other device has
queued behind its own send. CUDA promises no more than one queue does (NCCL issue 783): streams share queues, and what
waits at the head of one holds up all behind it.

The rule: transfers cannot deadlock if all devices issue theirs in an order that some order of all tasks and transfers
together contains (J. Bachan in NCCL issue 784). ``safe_order`` finds one by running the programs with blocking
transfers. Where all devices wait, it lets a device receive a message whose sender is waiting, before what that device
waits for itself; where none sends, it moves an all-reduce whose other members have still to come behind the device's
next step. All-gathers and reduce-scatters of sharded stages stay in their places, where copies of one order meet. Every
receive stays after its send and before its task, and every all-reduce after its gradients and before
the update. Programs change only where they would deadlock.

The proof is the same run without moves (``check_order``): if it comes to the end, it has found the order of all tasks
and transfers that the rule asks for, and no choice of streams, queues and speeds can deadlock. For whatever else waits
does so for something earlier in that order: compute for its messages, sends for compute, a host for the announcement of
a message (from a host that has come to its send), for room (``limited``), for the norm that it reads, for the end of a
step. Every tensor rank of a device issues the same, and sums within a task have nothing between them, so one rank
stands for all. Sums of tied parameters follow all transfers of a step, in one order everywhere. Not included: the blank
messages after an update that was undone (``ProgramRunner._break_off``).

Rejected: to send and receive opposite messages in one grouped call (``ncclGroupStart``, as Megatron does). It removes
the same deadlock between two devices, but one kernel then waits for both: a message that has come cannot be received
while the task runs whose result goes the other way. In 1F1B that is every message of the steady state. Circles of three
devices and more (interleaved stages) and all-reduces would need the order all the same.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from raypipe.errors import ScheduleError
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.ir import Task, Versions
from raypipe.schedule.lowering.asynchronous import WHOLE, Part
from raypipe.schedule.lowering.messages_in_flight import unreceived_messages
from raypipe.schedule.lowering.programs import Action, Inserted, Message, Program
from raypipe.schedule.sharding import ShardMember, StageKey

_Place = tuple[int, int, int]
"""(step, action, position among the action's steps)."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One step of a device that may wait for others."""

    kind: Literal["send", "receive", "sum", "shards", "end"]
    key: Hashable
    peer: int
    """The other device of a message."""
    what: Message | Task
    place: _Place


def issued(action: Action) -> Iterator[tuple[int, Message | Task]]:
    """Iterate over what an action issues: (position among its steps, message or task), inserted ones included."""
    own: list[Message | Task] = [*action.receives, action.task, *action.sends]
    inserted = deque(action.inserted)
    for position in range(len(own) + 1):
        while inserted and inserted[0].position == position:
            yield position, inserted.popleft().what
        if position < len(own) and not (action.deferred and own[position] is action.task):
            yield position, own[position]


@no_collection()
def safe_order(
    steps: Sequence[Sequence[Program]],
    microbatches: int,
    stashes: bool = False,
    shards: Mapping[StageKey, ShardMember] | None = None,
) -> list[list[Program]]:
    """Return the programs with receives moved forward and all-reduces moved back, as far as is needed.

    Programs that no such moves help come back unfinished, and ``check_order`` says where they deadlock.

    Args:
        steps: per step, the programs of all devices; steps of a schedule that does not flush follow one another.
        microbatches: N, the number of micro-batch ids in a step.
        stashes: updates are made per micro-batch, without sums and norm (PipeDream).
        shards: the schedule's sharded stage replicas.
    """
    run = _BlockingRun(steps, microbatches, stashes, shards or {})
    run.all(moves=True)
    return [
        [_with(program, step, run.inserted[d], run.deferred[d]) for d, program in enumerate(rows)]
        for step, rows in enumerate(steps)
    ]


def _with(
    program: Program, step: int, inserted: dict[tuple[int, int], list[Inserted]], deferred: set[tuple[int, int]]
) -> Program:
    return replace(
        program,
        ordered=True,
        actions=tuple(
            action._replace(inserted=tuple(inserted.get((step, i), ())), deferred=(step, i) in deferred)
            for i, action in enumerate(program.actions)
        ),
    )


def _entries(
    steps: Sequence[Sequence[Program]],
    device: int,
    microbatches: int,
    stashes: bool,
    shards: Mapping[StageKey, ShardMember],
) -> list[_Entry]:
    """List what a device issues; a receive comes after those of earlier messages of its channel, as in the runtime."""
    result: list[_Entry] = []
    received: set[Hashable] = set()
    posted: dict[int, deque[tuple[Hashable, Message]]] = {}
    for step, rows in enumerate(steps):
        program, shift = rows[device], step * microbatches
        calls = Counter[Hashable]()
        updated = False
        for source, messages in program.arrivals.items():
            posted.setdefault(source, deque()).extend((_key(m, shift), m) for m in messages)
        for i, action in enumerate(program.actions):
            for position, what in issued(action):
                place = (step, i, position)
                if isinstance(what, Message):
                    if what.local:
                        continue
                    if what.dst_device != device:
                        result.append(_Entry("send", _key(what, shift), what.dst_device, what, place))
                    while what.dst_device == device and _key(what, shift) not in received:
                        key, first = posted[what.src_device].popleft()
                        received.add(key)
                        result.append(_Entry("receive", key, what.src_device, first, place))
                elif what.kind == "AR":
                    calls[what.stage] += 1
                    result.append(_Entry("sum", (step, what.stage, calls[what.stage]), device, what, place))
                elif what.kind in ("AG", "RS"):
                    group = (what.kind, what.stage, shards[what.stage, what.replica].group)
                    calls[group] += 1
                    result.append(_Entry("shards", (step, group, calls[group]), device, what, place))
                elif what.kind == "U" and not (updated or stashes):
                    updated = True
                    for (stage, _), member in sorted(shards.items()):
                        if member.device == device and len(member.others) > 1:  # the sum of a shard over its holders
                            result.append(_Entry("shards", (step, "U", stage, member.others), device, what, place))
                    result.append(_Entry("end", (step,), device, what, place))
    return result


def _key(message: Message, shift: int) -> Hashable:
    return (message.direction, message.src_stage, message.dst_stage, message.mb + shift)


class _BlockingRun:
    """Runs the entries of all devices with blocking transfers, and moves some where all devices wait."""

    def __init__(
        self,
        steps: Sequence[Sequence[Program]],
        microbatches: int,
        stashes: bool,
        shards: Mapping[StageKey, ShardMember],
    ) -> None:
        self.steps, self.microbatches = steps, microbatches
        devices = range(len(steps[0]))
        self.entries = entries = [_entries(steps, d, microbatches, stashes, shards) for d in devices]
        self.at = [0 for _ in devices]
        self.moved: set[Hashable] = set()
        """Messages received before their place."""
        self.later: list[deque[_Entry]] = [deque() for _ in devices]
        """Per device, all-reduces that wait for a later place, in order."""
        self.inserted: list[dict[tuple[int, int], list[Inserted]]] = [{} for _ in devices]
        self.deferred: list[set[tuple[int, int]]] = [set() for _ in devices]
        self.members: dict[Hashable, list[int]] = {}
        self.receives: list[dict[Hashable, _Entry]] = [{} for _ in devices]
        for d, row in enumerate(entries):
            for e in row:
                if e.kind in ("sum", "shards", "end"):
                    self.members.setdefault(e.key, []).append(d)
                elif e.kind == "receive":
                    self.receives[d][e.key] = e

    def head(self, d: int) -> _Entry | None:
        """Return what the device does next."""
        row = self.entries[d]
        while self.at[d] < len(row) and row[self.at[d]].kind == "receive" and row[self.at[d]].key in self.moved:
            self.at[d] += 1
        return row[self.at[d]] if self.at[d] < len(row) else None

    def all(self, moves: bool) -> None:
        """Run until nothing is left or, with ``moves`` or without, nothing helps."""
        awake = set(range(len(self.entries)))
        while awake:
            while awake:
                awake |= self.advance(awake.pop())
            awake = (self.receive_early() or self.sum_later()) if moves else set()

    def advance(self, d: int) -> set[int]:
        """Run the device's next entry, if all others that it needs are there; return the devices that moved."""
        if self.later[d] and (moved := self.meet(self.later[d][0])):
            return moved
        e = self.head(d)
        if e is None:
            return set()
        if e.kind == "shards":
            return self.meet(e)
        if e.kind in ("sum", "end"):
            # An all-reduce stays behind earlier ones; the end comes after all.
            return set() if self.later[d] else self.meet(e)
        other = self.head(e.peer)
        if other is None or other.key != e.key or {e.kind, other.kind} != {"send", "receive"}:
            return set()
        self.at[d] += 1
        self.at[e.peer] += 1
        return {d, e.peer}

    def meet(self, e: _Entry) -> set[int]:
        """Run a collective on all its members, if all are there."""
        members = self.members[e.key]
        here = []
        for d in members:
            waiting = self.later[d][0] if self.later[d] else None
            head = self.head(d)
            if waiting is not None and waiting.key == e.key:
                here.append((d, True))
            elif (
                head is not None
                and head.key == e.key
                and head.kind == e.kind
                and (waiting is None or e.kind == "shards")
            ):
                here.append((d, False))
            else:
                return set()
        for d, moved in here:
            if moved:
                task = self.later[d].popleft()
                head = self.head(d)
                assert head is not None  # the end comes after all all-reduces
                self.insert(d, head.place, task.what)
            else:
                self.at[d] += 1
        return set(members)

    def insert(self, d: int, place: _Place, what: Message | Task) -> None:
        """Have the device issue something before its step at ``place``."""
        step, action, position = place
        row = self.inserted[d].setdefault((step, action), [])
        # Receives that the runtime issues at this very place, because a later one of their channel is needed.
        since = self.at[d]
        while since and self.entries[d][since - 1].place == place and self.entries[d][since - 1].kind == "receive":
            since -= 1
        for e in self.entries[d][since : self.at[d]]:
            if e.key not in self.moved:
                self.moved.add(e.key)
                row.append(Inserted(position, e.what))
        row.append(Inserted(position, what))

    def announced(self, d: int, place: _Place, e: _Entry) -> bool:
        """Return whether the device knows at ``place`` that the message will come.

        It does once its step has begun, or if its head sends the message.

        While an update is pending, devices announce and wait for messages of heads only.
        """
        step, action, _ = place
        if step != e.place[0]:
            return step > e.place[0]
        ahead = self.steps[step][d].ahead
        if ahead is None or action >= ahead.tasks:
            return True
        sender = self.receives[d][e.key].peer
        first = self.steps[step][d].arrivals[sender][: ahead.arrivals.get(sender, 0)]
        return e.what in first

    def receive_early(self) -> set[int]:
        """Let one device receive a message whose sender waits; return the devices that moved."""
        for d in range(len(self.entries)):
            e = self.head(d)
            if e is None or e.kind != "send" or e.key not in self.receives[e.peer]:
                continue
            here = self.head(e.peer)
            if here is None or not self.announced(e.peer, here.place, e):
                continue
            self.insert(e.peer, here.place, e.what)
            self.moved.add(e.key)
            self.at[d] += 1
            return {d, e.peer}
        return set()

    def sum_later(self) -> set[int]:
        """Move an all-reduce behind the next step of its device, preferably one for which another device waits."""
        heads = [self.head(d) for d in range(len(self.entries))]
        sums = [d for d, e in enumerate(heads) if e is not None and e.kind == "sum"]
        awaited = {e.peer for e in heads if e is not None and e.kind == "receive"}
        for d in [*(d for d in sums if d in awaited), *sums]:
            e = heads[d]
            assert e is not None
            self.later[d].append(e)
            self.deferred[d].add(e.place[:2])
            self.at[d] += 1
            return {d}
        return set()


@no_collection()
def check_order(
    steps: Sequence[Sequence[Program]],
    microbatches: int,
    stashes: bool = False,
    shards: Mapping[StageKey, ShardMember] | None = None,
) -> None:
    """Check that no execution of ordered programs on GPUs can deadlock; the arguments are those of ``safe_order``.

    Raises:
        ScheduleError: devices could wait for each other for ever; it names what each of them waits in.
    """
    run = _BlockingRun(steps, microbatches, stashes, shards or {})
    run.all(moves=False)
    waiting = [f"device {d} in {_said(head)}" for d in range(len(run.entries)) if (head := run.head(d)) is not None]
    if waiting:
        raise ScheduleError(
            "order of GPU operations",
            f"devices can wait for each other for ever: {', '.join(waiting)}",
            "choose another schedule",
        )


def _said(entry: _Entry) -> str:
    if not isinstance(entry.what, Message):
        return f"{entry.what} of its step {entry.place[0] + 1}"
    kind = "activation" if entry.what.direction == "act" else "gradient"
    stages = f"{entry.what.src_stage}>{entry.what.dst_stage}"
    return f"the {entry.kind} of {kind} {stages} of micro-batch {entry.what.mb}"


FILLS, RUNS, DRAINS = (True, False), (False, False), (False, True)
"""The parts of an asynchronous schedule, in order."""


def gpu_programs(
    train: Mapping[Part, Sequence[Program]],
    evaluate: Sequence[Program],
    microbatches: int,
    versions: Versions,
    shards: Mapping[StageKey, ShardMember] | None = None,
) -> tuple[dict[Part, list[Program]], list[Program]]:
    """Order the transfers of a plan's programs, and check that no execution of them on GPUs can deadlock.

    Args:
        train: per way that a step begins and ends, the programs of all devices.
        evaluate: the programs of a validation batch.
        microbatches: N, the number of micro-batch ids in a step.
        versions: the schedule's.
        shards: its sharded stage replicas (``sharding.members``).

    Raises:
        ScheduleError: devices could wait for each other for ever; it names their operations.
    """
    stashes = versions == "stash"
    done: dict[Part, list[Program]] = {}
    if WHOLE in train:
        done[WHOLE] = safe_order([train[WHOLE]], microbatches, stashes, shards)[0]
    if RUNS in train:
        in_a_row = (FILLS, RUNS, DRAINS)
        ordered = safe_order([train[part] for part in in_a_row], microbatches, stashes)
        done.update(zip(in_a_row, ordered, strict=True))
    validation = safe_order([evaluate], microbatches, stashes, shards)[0]
    done[WHOLE], validation = limited(done[WHOLE]), limited(validation)
    runs = [[done[WHOLE]], [validation]]
    if RUNS in done:
        runs += [[done[part] for part in row] for row in ((FILLS, DRAINS), (FILLS, RUNS, RUNS, DRAINS))]
    for steps in runs:
        check_order(steps, microbatches, stashes, shards)
    return done, validation


def limited(programs: Sequence[Program]) -> list[Program]:
    """Let hosts run no further ahead of their GPUs than messages could be unreceived anyway.

    A host issues sends, each with a copy of its message, long before the GPU comes to them. With this limit a device
    holds no more copies than the memory model counts. The wait costs the GPU no time: by the time the task that sends
    a message ends there, so many earlier ones have been used that there is room. And it cannot deadlock: a host waits
    only for transfers that it has issued before, and in the order that ``safe_order`` found, each of those can run
    before anything that is issued later. Steps that leave messages to the next one (asynchronous ones) have no limit.
    """
    return [
        replace(program, unreceived=limits)
        for program, limits in zip(programs, unreceived_messages(programs), strict=True)
    ]
