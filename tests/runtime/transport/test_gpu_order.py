"""Programs for GPUs over NCCL channels on fake GPUs: with few hardware queues, their order of transfers is needed."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from raypipe.errors import TransportError
from raypipe.runtime.executor.runner import ProgramRunner
from raypipe.runtime.transport.channel import Label, Peer, Progress, Receiver, Sender, StageIOSpec, TensorSpec
from raypipe.runtime.transport.gpu.nccl import NcclReceiver, NcclSender
from raypipe.runtime.transport.same_host.shm import ShmReceiver, ShmSender
from raypipe.schedule import Shape, generate
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import BACKWARD, KINDS
from raypipe.schedule.lowering.asynchronous import WHOLE
from raypipe.schedule.lowering.programs import Action, Message, Program, edges, step_programs
from raypipe.schedule.lowering.safe_order import limited, safe_order
from raypipe.schedule.passes import add_updates, place_gradient_sync
from raypipe.schedule.passes.sync import Sync
from tests.runtime.transport.fake_gpus import BlockingLink, FakeSide, Gpu, Wire

SPEC = TensorSpec((3,), torch.float32)
STEPS = 2


def content(step: int, m: Message) -> torch.Tensor:
    return torch.full(SPEC.shape, 1000.0 * step + 100 * m.src_stage + 10 * m.mb + (m.direction == "act"))


class Recording(NcclSender):
    """Remembers how many messages it sent, and how many were unreceived at once: none, if all were taken at once."""

    most = sent = 0

    def send(self, label: Label, tensors: Sequence[torch.Tensor]) -> None:
        super().send(label, tensors)
        self.sent += 1
        self.most = max(self.most, len(self._flying))


class FakeKernels(ProgramRunner):
    """Tasks are kernels that look at what their messages brought; all-reduces wait for all holders of the stage."""

    def __init__(
        self, gpu: Gpu, schedule: Schedule, senders: Mapping[int, Sender], receivers: Mapping[int, Receiver],
        sums: Mapping[int, threading.Barrier], timeout_s: float,
    ) -> None:  # fmt: skip
        spec = StageIOSpec((SPEC,), (True,))
        io = dict.fromkeys(schedule.graph.edges, spec)
        super().__init__(schedule.microbatches, timeout_s, senders, receivers, io)
        self.gpu, self.sums = gpu, sums
        self.group = {stage: gpu.stream() for stage in sums}
        self.looked = 0
        self.handlers = dict.fromkeys(KINDS, type(self).run_task)

    def run_task(self, action: Action) -> None:
        task = action.task
        if task.kind == "AR":
            barrier = self.sums[task.stage]

            def run() -> None:
                barrier.wait()

            self.group[task.stage].put(run)
        for m in action.receives:
            (arrived,) = self.p2p_buffers.pop((m.direction, m.src_stage, m.dst_stage, self.base + m.mb))
            self.gpu.compute.put(self._look(arrived, content(self.step, m), m.local))
        for m in action.sends:
            self.p2p_buffers[(m.direction, m.src_stage, m.dst_stage, self.base + m.mb)] = (content(self.step, m),)

    def _look(self, arrived: torch.Tensor, wanted: torch.Tensor, local: bool):  # type: ignore[no-untyped-def]
        def run() -> None:
            self.looked += 1
            assert torch.equal(arrived, wanted)

        return run


def run(schedule: Schedule, rows: Sequence[Program], queues: int, timeout_s: float) -> list[BaseException]:
    """Run two steps on fake GPUs, each with a host of its own; return what failed."""
    peers = [Peer(d, "n", f"cuda:{d}", f"device {d}") for d in range(schedule.devices)]
    gpus = [Gpu(queues) for _ in peers]
    senders: list[dict[int, Sender]] = [{} for _ in peers]
    receivers: list[dict[int, Receiver]] = [{} for _ in peers]
    progress = [Progress() for _ in peers]
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    for src, dst in edges(schedule):
        into, out = (
            ShmReceiver(peers[dst], peers[src], run_id, progress[dst]),
            ShmSender(peers[src], peers[dst], run_id),
        )
        out.connect(5)
        into.accept(5)
        wire, there, here = Wire(), FakeSide(gpus[src]), FakeSide(gpus[dst])
        senders[src][dst] = Recording(peers[dst], BlockingLink(wire, there), out, there)
        receivers[dst][src] = NcclReceiver(peers[src], BlockingLink(wire, here), into, here)
        progress[src].add(senders[src][dst])
    holders = Counter(stage for row in schedule.placement for stage in range(len(row)))
    sums = {stage: threading.Barrier(n) for stage, n in holders.items()}
    runners = [
        FakeKernels(gpus[d], schedule, senders[d], receivers[d], sums, timeout_s) for d in range(schedule.devices)
    ]
    failed: list[BaseException] = []

    def host(d: int) -> None:
        try:
            for step in range(STEPS):
                runners[d].walk(rows[d], step)
            done = threading.Event()
            gpus[d].compute.put(done.set)
            if not done.wait(timeout_s):
                raise TransportError(f"device {d}", "compute did not end")
        except BaseException as error:
            failed.append(error)

    hosts = [threading.Thread(target=host, args=(d,)) for d in range(schedule.devices)]
    for one in hosts:
        one.start()
    for one in hosts:
        one.join()
    for barrier in sums.values():
        barrier.abort()
    for gpu in gpus:
        gpu.end()
        failed += [error for error in gpu.failed if not isinstance(error, threading.BrokenBarrierError)]
    for d in range(schedule.devices):
        for channel in (*senders[d].values(), *receivers[d].values()):
            channel.close()
    if not failed:
        messages = sum(len(a.receives) for program in rows for a in program.actions)
        assert sum(r.looked for r in runners) == STEPS * messages
        for program in rows:
            for dst, limit in program.unreceived.items():
                sender = senders[program.device][dst]
                assert isinstance(sender, Recording)
                assert sender.sent
                assert sender.most <= limit
    return failed


def whole(name: str, devices: int, count: int, sync: Sync = "lazy") -> Schedule:
    schedule = generate(name, Shape(devices=devices, microbatches=count, chunks=2))
    return add_updates(place_gradient_sync(schedule, sync))


def single(name: str, devices: int, count: int) -> Schedule:
    return add_updates(generate(name, Shape(devices=devices, microbatches=count)))


CASES = {
    "1f1b": single("1f1b", 3, 5),
    "zb-v": single("zb-v", 2, 4),
    "interleaved-1f1b": whole("interleaved-1f1b", 2, 4),
    "chimera": add_updates(place_gradient_sync(generate("chimera", Shape(devices=4, microbatches=4)), "eager")),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("queues", [1, 2, 8])
def test_ordered_programs_finish_on_any_number_of_queues(name: str, queues: int) -> None:
    schedule = CASES[name]
    rows = limited(safe_order([step_programs(schedule)[WHOLE]], schedule.microbatches)[0])
    assert run(schedule, rows, queues, timeout_s=60) == []


@pytest.mark.parametrize("name", CASES)
def test_hosts_may_have_one_unreceived_message_at_a_time(name: str) -> None:
    """No limit can make ordered programs deadlock, however low."""
    schedule = CASES[name]
    rows = limited(safe_order([step_programs(schedule)[WHOLE]], schedule.microbatches)[0])
    rows = [replace(program, unreceived=dict.fromkeys(program.unreceived, 1)) for program in rows]
    assert run(schedule, rows, 1, timeout_s=60) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_plain_programs_deadlock_on_one_queue_and_the_error_names_a_message(name: str) -> None:
    schedule = CASES[name]
    failed = run(schedule, step_programs(schedule)[WHOLE], 1, timeout_s=1)
    assert failed
    assert all(isinstance(error, TransportError) for error in failed), failed
    assert any("was not received within 1 s" in str(error) or "did not come within" in str(error) for error in failed)


def test_plain_programs_finish_where_each_stream_has_its_queue() -> None:
    for schedule in CASES.values():
        assert run(schedule, step_programs(schedule)[WHOLE], 40, timeout_s=60) == []


def test_every_backward_of_1f1b_got_its_gradient() -> None:
    """That the kernels above look at something."""
    rows = step_programs(CASES["1f1b"])[WHOLE]
    assert sum(len(a.receives) for p in rows for a in p.actions if a.task.kind in BACKWARD) == 10
