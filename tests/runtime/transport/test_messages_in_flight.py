"""What channels really hold while devices run: never more than the schedule's bound, and as much where one is held up.

No channel holds a fast sender back; only the tasks that it waits for do.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Sequence

import pytest
import torch

from raypipe.runtime.transport.channel import Label, Peer, Progress
from raypipe.runtime.transport.same_host.shm import ShmReceiver, ShmSender
from raypipe.schedule import Shape, generate
from raypipe.schedule.ir import Schedule
from raypipe.schedule.lowering.messages_in_flight import held_messages
from raypipe.schedule.lowering.programs import Action, edges, programs
from tests.runtime.transport.test_gpu_order import FakeKernels


class Counted:
    """Bytes that are sent and not yet used, per device, at the sending and at the receiving end."""

    def __init__(self, devices: int) -> None:
        self.changed = threading.Condition()
        self.now = [[0] * devices, [0] * devices]
        self.most = [[0] * devices, [0] * devices]
        self.beside: list[dict[Action, int]] = [{} for _ in range(devices)]
        """What devices have held at both ends while a task ran, beside its own messages."""

    def add(self, src: int, dst: int, size: int) -> None:
        with self.changed:
            for end, device in enumerate((src, dst)):
                self.now[end][device] += size
                self.most[end][device] = max(self.most[end][device], self.now[end][device])
            self.changed.notify_all()


class CountingSender(ShmSender):
    counted: Counted
    edge: tuple[int, int]

    def send(self, label: Label, tensors: Sequence[torch.Tensor]) -> None:
        self.counted.add(*self.edge, sum(t.nbytes for t in tensors))
        super().send(label, tensors)


class Device(FakeKernels):
    """A runner on the CPU whose tasks take random times; used messages are no longer in flight."""

    counted: Counted
    held_until = 0
    """Bytes that device 0 has to have in flight before this device begins."""

    def run_task(self, action) -> None:  # type: ignore[no-untyped-def]
        with self.counted.changed:
            enough = self.counted.changed.wait_for(lambda: self.counted.most[0][0] >= self.held_until, 30)
        assert enough, "the bound is not reached"
        for m in action.receives:
            (arrived,) = self.p2p_buffers.pop((m.direction, m.src_stage, m.dst_stage, self.base + m.mb))
            if not m.local:
                self.counted.add(m.src_device, m.dst_device, -arrived.nbytes)
        time.sleep(random.random() * 0.002)
        d = self.program.device
        with self.counted.changed:
            self.counted.beside[d][action] = self.counted.now[0][d] + self.counted.now[1][d]
        for m in action.sends:
            self.p2p_buffers[(m.direction, m.src_stage, m.dst_stage, self.base + m.mb)] = (torch.zeros(3),)


def run(schedule: Schedule, held_until: int) -> Counted:
    peers = [Peer(d, "n", "cpu", f"device {d}") for d in range(schedule.devices)]
    counted = Counted(schedule.devices)
    senders: list[dict[int, ShmSender]] = [{} for _ in peers]
    receivers: list[dict[int, ShmReceiver]] = [{} for _ in peers]
    progress = [Progress() for _ in peers]
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    for src, dst in edges(schedule):
        into, out = (
            ShmReceiver(peers[dst], peers[src], run_id, progress[dst]),
            CountingSender(peers[src], peers[dst], run_id),
        )
        out.counted, out.edge = counted, (src, dst)
        out.connect(5)
        into.accept(5)
        senders[src][dst], receivers[dst][src] = out, into
        progress[src].add(out)
    failed: list[BaseException] = []
    rows = programs(schedule)

    def host(d: int) -> None:
        try:
            runner = Device(_NoGpu(), schedule, senders[d], receivers[d], {}, 60)  # type: ignore[arg-type]
            runner.counted = counted
            runner.held_until = held_until if d else 0
            runner.walk(rows[d], 0)
        except BaseException as error:
            failed.append(error)

    hosts = [threading.Thread(target=host, args=(d,)) for d in range(schedule.devices)]
    for one in hosts:
        one.start()
    for one in hosts:
        one.join()
    for d in range(schedule.devices):
        for channel in (*senders[d].values(), *receivers[d].values()):
            channel.close()
    assert failed == []
    assert counted.now == [[0] * schedule.devices] * 2
    return counted


class _NoGpu:
    def stream(self) -> None:
        """There is none."""


SIZE = 12
"""Bytes of three float32."""


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("1f1b", Shape(devices=4, microbatches=8)),
        ("gpipe", Shape(devices=3, microbatches=6)),
        ("interleaved-1f1b", Shape(devices=3, microbatches=6, chunks=2)),
        ("zb-v", Shape(devices=3, microbatches=6)),
    ],
)
def test_channels_hold_what_the_schedule_allows(name: str, shape: Shape) -> None:
    schedule = generate(name, shape)

    rows = programs(schedule)
    # In 1F1B and GPipe device 0 fills the pipeline by itself: hold up all others until it has.
    filled = {"1f1b": min(shape.devices, shape.microbatches), "gpipe": shape.microbatches}.get(name, 0) * SIZE
    for held_until in {0, filled}:
        counted = run(schedule, held_until)
        assert counted.most[0][0] >= held_until
        # What the memory model counts beside a task's own messages.
        for beside, held, program in zip(
            counted.beside, held_messages(schedule, [SIZE] * schedule.stages), rows, strict=True
        ):
            for action, most in zip(program.actions, held, strict=True):
                assert beside[action] <= most
