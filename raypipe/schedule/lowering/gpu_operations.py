"""The GPU operations that programs issue, as ``stream_order`` takes them: what the runtime does on GPUs with NCCL.

Per process (``runtime.executor``, ``transport.gpu``, ``update``):

- A task is a kernel on the compute stream. It waits for the receives of its messages.
- A send is issued after its task, on the channel's stream, after all compute issued so far. The host announces it.
  Before, where ``Program.unreceived`` says so, the host waits until few enough earlier ones have not been received.
- A receive is issued when a task needs it, or where ``safe_order`` has inserted it; the host first waits for the
  announcement, and receives of earlier messages of that channel are issued first. It does not wait for compute.
- A channel also has a side stream, which carries only waits; one operation stands for them.
- An all-reduce of gradients runs on its group's stream. Its buckets may begin in the task before it, but only where
  nothing else is issued in between (``programs.completed_by``), so one operation stands for all of them. Before the
  first update, compute waits for all of them; then tied parameters are summed, one after another.
- Sharded stages (``sharding.members``): an AG or RS runs on the stream of its stage's shard group, after all compute
  issued so far; those of one group run in the order of issue. Compute waits for an AG before the next task of its
  stage, and for all RS but the last before a stage's gradients get a new buffer. Before the first update it waits for
  all RS; then shards are summed over the groups that replicate them (HSDP), one stage after another. FREE issues
  nothing.
- The host reads the gradient norm from the GPU and exchanges it with all others. (An update that does not wait for the
  norm does so later. To assume it here adds a wait for others, and takes away none.)
- With tensor parallelism, a task's kernels are interleaved with all-reduces over its device's processes; one stands for
  all of a task's, which are issued in one order on all of them with nothing in between.
- At the end of a step the host waits until all its messages have been received, and for its compute.

Not included: the blank messages after an update that was undone (``ProgramRunner._break_off``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from raypipe.schedule.ir import Task
from raypipe.schedule.kinds import SHARDED, WEIGHT_GRADIENTS
from raypipe.schedule.lowering.programs import Action, Message, Program
from raypipe.schedule.lowering.stream_order import HOST, GpuOperation
from raypipe.schedule.sharding import ShardMember, StageKey

COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Operations:
    """All that the processes issue; the arguments of ``find_circle``."""

    processes: list[list[GpuOperation]]
    """Per process, in rank order."""
    members: dict[Hashable, int]
    """Per all-reduce, how many processes take part."""


def gpu_operations(
    steps: Sequence[Sequence[Program]],
    microbatches: int,
    *,
    tied: Mapping[str, tuple[int, ...]] | None = None,
    tensor: int = 1,
    stashes: bool = False,
    shards: Mapping[StageKey, ShardMember] | None = None,
) -> Operations:
    """Return the operations of successive steps.

    Args:
        steps: per step, the programs of all devices.
        microbatches: N, the number of micro-batch ids in a step.
        tied: devices of each group that sums tied parameters, by name, in the order in which they are summed.
        tensor: number of tensor-parallel processes of a device.
        stashes: updates are made per micro-batch, without sums and norm (PipeDream).
        shards: the schedule's sharded stage replicas.
    """
    holders = Counter[int]()
    for program in steps[0]:
        holders.update({action.task.stage for action in program.actions if action.task.kind == "AR"})
    members: dict[Hashable, int] = {}
    processes: list[list[GpuOperation]] = []
    for device in range(len(steps[0])):
        for rank in range(tensor):
            one = _Process(
                device, rank, tensor, len(steps[0]) * tensor, holders, tied or {}, stashes, shards or {}, members
            )
            for step, rows in enumerate(steps):
                one.step(rows[device], step, microbatches)
            processes.append(one.operations)
    return Operations(processes, members)


def issued(action: Action) -> Iterator[tuple[int, Message | Task]]:
    """Iterate over what an action issues: (position among its steps, message or task), inserted ones included."""
    own: list[Message | Task] = [*action.receives, action.task, *action.sends]
    inserted = deque(action.inserted)
    for position in range(len(own) + 1):
        while inserted and inserted[0].position == position:
            yield position, inserted.popleft().what
        if position < len(own) and not (action.deferred and own[position] is action.task):
            yield position, own[position]


@dataclass(slots=True)
class _Process:
    """Collects the operations of one process."""

    device: int
    rank: int
    """Tensor rank."""
    tensor: int
    world: int
    """Number of all processes."""
    holders: Mapping[int, int]
    """Per stage, how many devices all-reduce its gradients."""
    tied: Mapping[str, tuple[int, ...]]
    stashes: bool
    shards: Mapping[StageKey, ShardMember]
    members: dict[Hashable, int]
    operations: list[GpuOperation] = field(default_factory=list)
    _compute: tuple[int, ...] = ()
    """The last operation of the compute stream."""
    _received: dict[Hashable, int] = field(default_factory=dict)
    _posted: dict[int, deque[tuple[Hashable, str]]] = field(default_factory=dict)
    _channels: set[str] = field(default_factory=set)
    _gathering: dict[StageKey, int] = field(default_factory=dict)
    """Gathers that compute has not waited for yet."""
    _scattering: list[int] = field(default_factory=list)
    """Reduce-scatters that compute has not waited for yet, oldest first."""
    _open: set[StageKey] = field(default_factory=set)
    """Sharded stages whose gradients accumulate."""

    def step(self, program: Program, step: int, microbatches: int) -> None:
        """Add one step."""
        shift = step * microbatches
        for source, messages in program.arrivals.items():
            line = self._posted.setdefault(source, deque())
            line.extend((self._key(m, shift), f"receive of {_said(m)}") for m in messages)
        sent: dict[int, list[int]] = {}
        sums: list[int] = []
        calls = Counter[Hashable]()
        updated = False
        for action in program.actions:
            needed: list[int] = []
            for _, what in issued(action):
                if isinstance(what, Message):
                    if what.local:
                        continue
                    if what.dst_device == self.device:
                        index = self._receive(what.src_device, self._key(what, shift))
                        if what in action.receives:
                            needed.append(index)
                    else:
                        earlier = sent.setdefault(what.dst_device, [])
                        limit = program.unreceived.get(what.dst_device, 0)
                        if limit and len(earlier) >= limit:
                            self._host(f"room for {_said(what)}", (earlier[-limit],))
                        earlier.append(self._send(what, self._key(what, shift)))
                elif what.kind == "AR":
                    calls[what.stage] += 1
                    if self.holders.get(what.stage, 0) > 1:
                        key = ("sum", what.stage, calls[what.stage], step, self.rank)
                        sums.append(
                            self._collective(str(what), f"sum of stage {what.stage}", key, self.holders[what.stage])
                        )
                elif what.kind in SHARDED:
                    self._sharded(what, step, calls)
                elif what.kind == "U" and self.stashes:
                    self._host("norm of an update", self._compute)
                elif what.kind == "U" and not updated:
                    updated = True
                    self._before_updates(sums, step)
                else:
                    self._task(what, tuple(needed), (step, action.task, len(self.operations)))
        for destination, transfers in sent.items():
            self._host(f"flush to device {destination}", tuple(transfers))
        self._host("end of the step", self._compute)

    def _key(self, message: Message, shift: int) -> Hashable:
        return (message.direction, message.src_stage, message.dst_stage, message.mb + shift, self.rank)

    def _add(self, operation: GpuOperation) -> int:
        self.operations.append(operation)
        return len(self.operations) - 1

    def _kernel(self, name: str, after: tuple[int, ...]) -> None:
        self._compute = (self._add(GpuOperation(name, COMPUTE, after)),)

    def _host(self, name: str, after: tuple[int, ...], meetings: tuple[Hashable, ...] = ()) -> None:
        self._add(GpuOperation(name, HOST, after, meetings))

    def _collective(self, name: str, stream: str, key: Hashable, count: int) -> int:
        self.members[key] = count
        return self._add(GpuOperation(name, stream, self._compute, (key,)))

    def _sharded(self, task: Task, step: int, calls: Counter[Hashable]) -> None:
        key = (task.stage, task.replica)
        if task.kind == "FREE":
            return
        calls[task.kind, key] += 1
        stage, group = key[0], self.shards[key].group
        meeting = (stage, group, task.kind, step, calls[task.kind, key], self.rank)
        index = self._collective(str(task), f"shards of stage {stage}, {group[0]}", meeting, len(group))
        if task.kind == "AG":
            self._gathering[key] = index
        else:
            self._scattering.append(index)
            self._open.discard(key)

    def _waits_for_shards(self, task: Task) -> tuple[int, ...]:
        """The collectives of shards that a task waits for."""
        key = (task.stage, task.replica)
        if key not in self.shards:
            return ()
        found = [self._gathering.pop(key)] if key in self._gathering else []
        if task.kind in WEIGHT_GRADIENTS and key not in self._open:
            self._open.add(key)
            found += self._scattering[:-1]
            del self._scattering[:-1]
        return tuple(found)

    def _task(self, task: Task, needed: tuple[int, ...], unique: Hashable) -> None:
        self._kernel(str(task), needed + self._waits_for_shards(task))
        if self.tensor > 1 and task.mbs:
            done = self._collective(f"sums within {task}", "tensor group", (self.device, unique), self.tensor)
            self._kernel(f"end of {task}", (done,))

    def _channel(self, name: str) -> str:
        if name not in self._channels:
            self._channels.add(name)
            self._add(GpuOperation(f"side stream {name}", f"side {name}"))
        return name

    def _send(self, message: Message, key: Hashable) -> int:
        stream = self._channel(f"to device {message.dst_device}")
        return self._add(GpuOperation(f"send of {_said(message)}", stream, self._compute, (key,)))

    def _receive(self, source: int, key: Hashable) -> int:
        """Issue a receive, and those of earlier messages of the channel before it."""
        stream = self._channel(f"from device {source}")
        while key not in self._received:
            first, name = self._posted[source].popleft()
            # The host waits for the announcement of the message that it wants, which comes after the earlier ones.
            self._received[first] = self._add(GpuOperation(name, stream, (), (first,), (key,)))
        return self._received[key]

    def _before_updates(self, sums: list[int], step: int) -> None:
        self._kernel("wait for reduce-scatters", tuple(self._scattering))
        self._scattering.clear()
        self._open.clear()
        for (stage, replica), member in sorted(self.shards.items()):
            if member.device == self.device and len(member.others) > 1:
                said = f"shards of stage {stage} over {member.others}"
                shard = ("shard", stage, member.others, step, self.rank)
                index = self._collective(f"{said}, replica {replica}", said, shard, len(member.others))
                self._kernel(f"end of {said}", (index,))
        self._kernel("wait for gradient sums", tuple(sums))
        for name, ranks in self.tied.items():
            if self.device in ranks:
                key = ("tied", name, step, self.rank)
                self._kernel(f"tied {name}", (self._collective(f"sum of {name}", f"sum of {name}", key, len(ranks)),))
        self._host("gradient norm", self._compute)
        self.members["norm", step] = self.world
        self._host("exchange of the gradient norm", (), (("norm", step),))


def _said(message: Message) -> str:
    return f"{'activation' if message.direction == 'act' else 'gradient'} {message.src_stage}>{message.dst_stage} of micro-batch {message.mb}"  # noqa: E501
