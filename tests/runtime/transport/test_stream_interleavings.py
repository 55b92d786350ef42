"""Messages between GPUs under random interleavings of their streams: whatever the order, the numbers are the same.

The channels' own code (``NcclSender``, ``NcclReceiver``) runs the messages of every family's schedule on the CPU, over
streams that are queues: a device takes its time, and which queue goes on next is drawn. A wait that is missing, or
memory that is used again too early, gives other numbers. Tasks compute in place, in one buffer of their device.
"""

from __future__ import annotations

import os
import random
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from raypipe.runtime.transport.channel import Expected, Label, Peer, TensorSpec
from raypipe.runtime.transport.gpu import nccl
from raypipe.runtime.transport.gpu.nccl import NcclReceiver, NcclSender
from raypipe.schedule import SCHEDULES, Shape, generate
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.programs import Message, programs

INTERLEAVINGS = int(os.environ.get("INTERLEAVINGS", "20"))
"""Of each family; 200 have been run."""
WIDTH, DEVICES, MICROBATCHES = 3, 4, 8
SHAPES = {name: Shape(devices=DEVICES, microbatches=MICROBATCHES) for name in SCHEDULES}


@dataclass(eq=False)
class Mark:
    passed: bool = False

    def query(self) -> bool:
        return self.passed


@dataclass(eq=False)
class Stream:
    """Work in order: a function; a mark to pass or to wait for; a tensor for the other end of a link, or from it."""

    queue: deque[tuple[str, Any]] = field(default_factory=deque)

    def put(self, kind: str, what: Any) -> None:
        self.queue.append((kind, what))


class World:
    """All streams of all devices, and the draw of which goes on."""

    def __init__(self, seed: int, faults: Sequence[str] = ()) -> None:
        self.draw, self.faults, self.streams = random.Random(seed), faults, list[Stream]()

    def stream(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def run(self, most: int | None = None) -> None:
        """Let the devices do so many things, or all that they can."""
        done = 0
        while (most is None or done < most) and (able := [s for s in self.streams if self._can(s)]):
            stream = self.draw.choice(able)
            kind, what = stream.queue.popleft()
            if kind == "do":
                what()
            elif kind == "record":
                what.passed = True
            elif kind == "send":
                link, tensor = what
                link.receiving.queue.popleft()[1][1].copy_(tensor)
            done += 1

    def _can(self, stream: Stream) -> bool:
        """A receive goes with its send."""
        if not stream.queue:
            return False
        kind, what = stream.queue[0]
        if kind == "send":
            there = what[0].receiving
            return bool(there and there.queue and there.queue[0][0] == "recv" and there.queue[0][1][0] is what[0])
        return kind != "recv" and (kind != "wait" or what.passed)


class Memory:
    """The allocator of a device's compute stream: what nobody holds is given to the next who asks."""

    def __init__(self, compute: Stream) -> None:
        self.compute, self.free = compute, list[Tensor]()

    def snapshot(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Stand in for ``nccl.snapshot``: the copy is made when the compute stream comes to it."""
        made = []
        for tensor in tensors:
            memory = self.free.pop() if self.free else torch.empty(WIDTH, dtype=torch.float64)
            self.compute.put("do", lambda memory=memory, tensor=tensor: memory.copy_(tensor))
            block = memory.view(WIDTH)
            weakref.finalize(block, self.free.append, memory)
            made.append(block)
        return made


class QueuedSide:
    """The stream of an edge at one of its ends."""

    device = torch.device("cpu")

    def __init__(self, world: World, compute: Stream) -> None:
        self.world, self.compute, self.stream = world, compute, world.stream()

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        if "no wait before a send" not in self.world.faults:
            now = Mark()
            self.compute.put("record", now)
            self.stream.put("wait", now)
        yield

    @contextmanager
    def independent(self) -> Iterator[None]:
        yield

    def mark(self) -> Mark:
        made = Mark("memory used again too early" in self.world.faults)
        self.stream.put("record", made)
        return made

    def borrow(self, tensors: Iterable[Tensor]) -> None:
        pass

    def hand_over(self, mark: Mark, tensors: Iterable[Tensor]) -> None:
        if "no wait after a receive" not in self.world.faults:
            self.compute.put("wait", mark)


class QueuedLink:
    """A communicator of an edge, whose ends are on two streams."""

    def __init__(self) -> None:
        self.sending: Stream | None = None
        self.receiving: Stream | None = None

    def send(self, tensor: Tensor) -> None:
        assert self.sending is not None
        self.sending.put("send", (self, tensor.view(WIDTH)))  # another object: its memory is not held by it

    def recv(self, tensor: Tensor) -> None:
        assert self.receiving is not None
        tensor.fill_(torch.nan)
        self.receiving.put("recv", (self, tensor))

    def close(self) -> None:
        pass


class Envelopes:
    """The CPU channel of an edge, both ends."""

    pending = False

    def __init__(self) -> None:
        self.sent: dict[Label, list[Tensor]] = {}
        self.ever: set[Label] = set()

    def send(self, label: Label, tensors: list[Tensor]) -> None:
        self.sent[label] = tensors
        self.ever.add(label)

    def post(self, expected: Sequence[Expected]) -> None:
        pass

    def recv(self, label: Label, timeout_s: float) -> list[Tensor]:
        return self.sent.pop(label)


def label_of(m: Message) -> Label:
    return Label(m.direction, m.src_stage, m.dst_stage, m.mb, 0)


def step(schedule: Schedule, seed: int, faults: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Run a step of a schedule's messages; return what each device has summed up."""
    world, lowered = World(seed, faults), programs(schedule)
    compute = {p.device: world.stream() for p in lowered}
    memory = {device: Memory(stream) for device, stream in compute.items()}
    envelopes: dict[tuple[int, int], Envelopes] = defaultdict(Envelopes)
    links: dict[tuple[int, int], QueuedLink] = defaultdict(QueuedLink)
    senders: dict[tuple[int, int], NcclSender] = {}
    receivers: dict[tuple[int, int], NcclReceiver] = {}
    spec = (TensorSpec((WIDTH,), torch.float64),)
    for p in lowered:
        for src, messages in p.arrivals.items():
            edge = src, p.device
            out, into = QueuedSide(world, compute[src]), QueuedSide(world, compute[p.device])
            links[edge].sending, links[edge].receiving = out.stream, into.stream
            senders[edge] = NcclSender(Peer(p.device, "n", "cuda:b"), links[edge], envelopes[edge], out)  # type: ignore
            receivers[edge] = NcclReceiver(Peer(src, "n", "cuda:a"), links[edge], envelopes[edge], into)  # type: ignore
            receivers[edge].post([Expected(label_of(m), spec) for m in messages])
    made = {p.device: torch.zeros(WIDTH, dtype=torch.float64) for p in lowered}
    sums = {p.device: torch.zeros(WIDTH, dtype=torch.float64) for p in lowered}
    inside: dict[Message, Tensor] = {}
    left = {p.device: deque(p.actions) for p in lowered}
    while any(left.values()):
        world.run(world.draw.randrange(12))
        able = [d for d, actions in left.items() if actions and _arrived(actions[0].receives, envelopes)]
        device = world.draw.choice(able)
        action = left[device].popleft()
        came = []
        for m in action.receives:
            if m.local:
                came.append(inside.pop(m))
            else:
                came += receivers[m.src_device, device].recv(label_of(m), 1.0)
        compute[device].put("do", _task(made[device], sums[device], came, float(len(left[device]))))
        for m in action.sends:
            if m.local:
                (inside[m],) = memory[device].snapshot([made[device]])
                continue
            monkeypatch.setattr(nccl, "snapshot", memory[device].snapshot)
            senders[device, m.dst_device].send(label_of(m), [made[device]])
    world.run()
    assert not any(stream.queue for stream in world.streams), "the streams wait for one another"
    return [sums[device] for device in sorted(sums)]


def _arrived(receives: Sequence[Message], envelopes: dict[tuple[int, int], Envelopes]) -> bool:
    return all(m.local or label_of(m) in envelopes[m.src_device, m.dst_device].ever for m in receives)


def _task(made: Tensor, sums: Tensor, came: list[Tensor], number: float) -> Callable[[], None]:
    def compute() -> None:
        made.fill_(number + 1)
        for tensor in came:
            made.mul_(0.5).add_(tensor, alpha=0.75)
        sums.mul_(1.01).add_(made)

    return compute


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_family_gives_the_same_bits_in_every_interleaving(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = generate(name, SHAPES[name])
    expected = step(schedule, 0, (), monkeypatch)
    assert all(value.isfinite().all() for value in expected)
    for seed in range(1, INTERLEAVINGS + 1):
        result = step(schedule, seed, (), monkeypatch)
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True)), f"interleaving {seed}"


FAULTS = ("no wait before a send", "no wait after a receive", "memory used again too early")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_gives_other_numbers(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = generate("1f1b", SHAPES["1f1b"])
    expected = step(schedule, 0, (), monkeypatch)
    runs = [step(schedule, seed, (fault,), monkeypatch) for seed in range(1, 11)]
    assert any(not torch.equal(a, b) for result in runs for a, b in zip(result, expected, strict=True))
