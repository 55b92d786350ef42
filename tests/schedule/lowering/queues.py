"""GPUs that run programs literally: hosts that issue, streams on hardware queues, transfers that need all their ends.

It knows hosts, queues and heads, where ``safe_order`` knows only one order of everything. What the runtime issues:

- A task is a kernel on the compute stream; it waits for the receives of its messages, and of a sharded stage for its
  last gather. A send follows its task on its channel's stream. A host issues a receive when it has heard of the send.
- A sum runs on its stage's stream, a gather or reduce-scatter on its group's, each after all compute issued so far.
- Before the first update, compute waits for all of them; then a shard is summed over its other holders, and the host
  reads the norm and exchanges it with all others. At the end of a step it waits for its sends and its compute.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from raypipe.schedule.lowering.programs import Message, Program
from raypipe.schedule.lowering.safe_order import issued
from raypipe.schedule.sharding import ShardMember

HOST = "host"
"""The stream of what stops the host until it is done."""
Shards = Mapping[tuple[int, int], ShardMember]


class Op(NamedTuple):
    """One operation of a device."""

    name: str
    stream: str
    after: tuple[int, ...]
    """Operations of the same device that have to be done before, by number."""
    meets: Hashable = None
    """The transfer or collective that it is an end of."""
    announced: bool = False
    """Whether the host waits until another host has come to an end of it."""


def operations(
    steps: Sequence[Sequence[Program]], microbatches: int, stashes: bool = False, shards: Shards | None = None
) -> list[list[Op]]:
    """What the devices issue in successive steps."""
    return [_of_device(steps, d, microbatches, stashes, shards or {}) for d in range(len(steps[0]))]


def _of_device(
    steps: Sequence[Sequence[Program]], device: int, microbatches: int, stashes: bool, shards: Shards
) -> list[Op]:
    ops: list[Op] = []
    received: dict[Hashable, int] = {}
    line: dict[int, deque[Hashable]] = {}
    gathered: dict[tuple[int, int], int] = {}

    def add(*op: object) -> int:
        ops.append(Op(*op))  # type: ignore[arg-type]
        return len(ops) - 1

    compute: tuple[int, ...] = ()
    for step, rows in enumerate(steps):
        program, calls, updated = rows[device], Counter[Hashable](), False
        sums: list[int] = []
        sends: list[int] = []
        for source, messages in program.arrivals.items():
            line.setdefault(source, deque()).extend(_key(m, step * microbatches) for m in messages)
        for action in program.actions:
            needed: list[int] = []
            for _, what in issued(action):
                if isinstance(what, Message):
                    key = _key(what, step * microbatches)
                    if not what.local and what.dst_device != device:
                        sends.append(add(f"send {what}", f"to {what.dst_device}", compute, key))
                    elif not what.local:
                        while key not in received:
                            first = line[what.src_device].popleft()
                            received[first] = add(f"receive {first}", f"from {what.src_device}", (), first, True)
                        needed += [received[key]] if what in action.receives else []
                    continue
                kind, stage, _, replica = what
                at = (stage, replica)
                if kind in ("AR", "AG", "RS"):
                    group = shards[at].group if kind != "AR" else ()
                    calls[kind, stage, group] += 1
                    key = (step, kind, stage, group, calls[kind, stage, group])
                    one = add(str(what), f"group of {stage} {group}", compute, key)
                    if kind == "AG":
                        gathered[at] = one
                    else:
                        sums.append(one)
                elif kind == "U" and not stashes:
                    if not updated:
                        updated = True
                        compute = (add("sums", "compute", tuple(sums)),)
                        for (s, _), member in sorted(shards.items()):
                            if member.device == device and len(member.others) > 1:
                                summed = add("shard", f"others {s}", compute, (step, s, member.others))
                                compute = (add("shard is summed", "compute", (summed,)),)
                        add("norm", HOST, compute, (step, "norm"))
                elif kind != "FREE":
                    needed += [gathered.pop(at)] if at in gathered else []
                    compute = (add(str(what), "compute", (*needed, *compute)),)
        add("end of the step", HOST, (*sends, *compute))
    return ops


def _key(message: Message, shift: int) -> Hashable:
    return message._replace(mb=message.mb + shift)


def streams(ops: Sequence[Op]) -> int:
    """How many streams a device uses."""
    return len({op.stream for op in ops} - {HOST})


def finishes(devices: Sequence[Sequence[Op]], queues: int) -> bool:
    """Whether all operations run where the streams of a device share so many hardware queues, in turn."""
    count, done = [0] * len(devices), [set[int]() for _ in devices]
    lines: list[dict[object, deque[int]]] = [{} for _ in devices]
    ends: dict[Hashable, list[tuple[int, int]]] = {}
    names = [sorted({op.stream for op in ops} - {HOST}) for ops in devices]
    queue_of = [{HOST: HOST, **{name: n % queues for n, name in enumerate(own)}} for own in names]
    for d, ops in enumerate(devices):
        for i, op in enumerate(ops):
            if op.meets is not None:
                ends.setdefault(op.meets, []).append((d, i))
    reached: set[tuple[int, int]] = set()

    def ready(d: int, i: int) -> bool:
        line = lines[d].get(queue_of[d][devices[d][i].stream])
        return bool(line) and line[0] == i and done[d].issuperset(devices[d][i].after)  # type: ignore[index]

    moved = True
    while moved:
        moved = False
        for d, ops in enumerate(devices):
            while count[d] < len(ops) and not lines[d].get(HOST):
                i, op = count[d], ops[count[d]]
                reached.add((d, i))
                if op.announced and not all(end in reached for end in ends[op.meets]):
                    break
                lines[d].setdefault(queue_of[d][op.stream], deque()).append(i)
                count[d], moved = i + 1, True
            for line in lines[d].values():
                while line and (together := ends.get(ops[line[0]].meets, [(d, line[0])])):
                    if not all(ready(*end) for end in together):
                        break
                    moved = True
                    for other, i in together:
                        lines[other][queue_of[other][devices[other][i].stream]].popleft()
                        done[other].add(i)
    return all(len(one) == len(ops) for one, ops in zip(done, devices, strict=True))
