"""NCCL and pinned channels: their logic on the CPU with a stream that does everything at once, the rest on a GPU."""

from __future__ import annotations

import os
import queue
import signal
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

from raypipe.errors import TransportError
from raypipe.runtime.transport.channel import Expected, Label, Peer, Progress, TensorSpec
from raypipe.runtime.transport.gpu.nccl import NcclReceiver, NcclSender
from raypipe.runtime.transport.gpu.pinned import PinnedReceiver, PinnedSender
from raypipe.runtime.transport.gpu.side_stream import CopyStream, Mark, snapshot
from raypipe.runtime.transport.inbox import empty, empty_pinned
from raypipe.runtime.transport.same_host.shm import ShmReceiver, ShmSender

A, B = Peer(0, "n", "cuda:a", "stage 0"), Peer(1, "n", "cuda:a", "stage 1")


class Gate:
    """A mark that is passed when the test says so."""

    def __init__(self, passed: bool) -> None:
        self.passed = passed

    def query(self) -> bool:
        return self.passed


class Inline:
    """A side stream on the CPU: work is done when it is issued, marks are passed when ``open``."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.open = True
        self.gates: list[Gate] = []
        self.handed: list[Mark] = []

    @contextmanager
    def after_compute(self) -> Iterator[None]:
        yield

    independent = after_compute

    def mark(self) -> Mark:
        self.gates.append(Gate(self.open))
        return self.gates[-1]

    def borrow(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def hand_over(self, mark: Mark, tensors: Iterable[torch.Tensor]) -> None:
        self.handed.append(mark)


class StageIOSpec:
    """A link that carries tensors in order, and refuses what NCCL would hang on."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self.closed = 0

    def send(self, tensor: torch.Tensor) -> None:
        assert tensor.numel()
        assert tensor.is_contiguous()
        self.queue.put(tensor.clone())

    def recv(self, tensor: torch.Tensor) -> None:
        sent = self.queue.get_nowait()  # nothing may be received before its send is queued
        assert (sent.dtype, sent.shape) == (tensor.dtype, tensor.shape)
        tensor.copy_(sent)

    def close(self) -> None:
        self.closed += 1


def label(mb: int) -> Label:
    return Label("act", 0, 1, mb, 0)


def expected(mb: int, *tensors: torch.Tensor) -> Expected:
    return Expected(label(mb), tuple(TensorSpec(tuple(x.shape), x.dtype) for x in tensors))


@pytest.fixture
def base() -> Iterator[tuple[ShmSender, ShmReceiver]]:
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    receiver, sender = ShmReceiver(B, A, run_id), ShmSender(A, B, run_id)
    sender.connect(1)
    receiver.accept(1)
    yield sender, receiver
    sender.close()
    receiver.close()


def test_nccl_delivers_in_any_order_what_was_sent_in_one(base: tuple[ShmSender, ShmReceiver]) -> None:
    link, there, here = StageIOSpec(), Inline(), Inline()
    sender, receiver = NcclSender(B, link, base[0], there), NcclReceiver(A, link, base[1], here)
    x = torch.arange(12.0).reshape(3, 4)
    receiver.post([expected(mb, x, torch.zeros(0, 2), x.t()) for mb in range(3)])
    for mb in range(3):
        sender.send(label(mb), [x + mb, torch.zeros(0, 2), (x + mb).t()])
    for mb in (2, 0, 1):
        whole, nothing, turned = receiver.recv(label(mb), 1)
        assert torch.equal(whole, x + mb)
        assert nothing.shape == (0, 2)
        assert torch.equal(turned, (x + mb).t())
        assert here.handed[-1] is here.gates[mb], "compute must wait for this message's own receive"
    sender.flush(1)


@pytest.mark.parametrize(
    ("due", "comes", "says"),
    [
        (torch.zeros(2, 3), [torch.zeros(3, 2)], r".*float32 2x3\] but .*float32 3x2\] came"),
        (torch.zeros(2), [torch.zeros(2)] * 200, ".* but .* came"),  # a longer header
    ],
)
def test_nccl_refuses_a_wrong_message_before_receiving_it(
    due: torch.Tensor, comes: list[torch.Tensor], says: str, base: tuple[ShmSender, ShmReceiver]
) -> None:
    link = StageIOSpec()
    sender, receiver = NcclSender(B, link, base[0], Inline()), NcclReceiver(A, link, base[1], Inline())
    receiver.post([expected(0, due)])
    sender.send(label(0), comes)
    with pytest.raises(TransportError, match=f"expected .*micro-batch 0, {says}"):
        receiver.recv(label(0), 1)
    assert not link.queue.empty()


def test_nccl_times_out_on_the_host(base: tuple[ShmSender, ShmReceiver]) -> None:
    receiver = NcclReceiver(A, StageIOSpec(), base[1], Inline())
    receiver.post([expected(mb, torch.zeros(1)) for mb in (4, 5)])
    with pytest.raises(TransportError, match=r"stage 0 \(rank 0\): activation of micro-batch 5, .* within 0\.02 s"):
        receiver.recv(label(5), 0.02)


def killed(do: Callable[[], object]) -> int:
    """Run ``do`` in a process of its own that is killed right after it; return its id."""
    process = os.fork()
    if process == 0:
        with suppress(BaseException):
            do()
        os.kill(os.getpid(), signal.SIGKILL)
    return process


@pytest.mark.parametrize("kind", ["nccl", "pinned"])
def test_a_killed_sender_is_named(kind: str) -> None:
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    peer = killed(lambda: ShmSender(A, B, run_id).connect(5))
    base = ShmReceiver(B, A, run_id)
    base.accept(5)
    os.waitpid(peer, 0)
    receiver = NcclReceiver(A, StageIOSpec(), base, Inline()) if kind == "nccl" else PinnedReceiver(base, Inline())
    receiver.post([expected(3, torch.zeros(1))])
    with pytest.raises(TransportError, match=r"stage 0 \(rank 0\): connection lost while waiting for .*micro-batch 3"):
        receiver.recv(label(3), 20)
    receiver.close()


@pytest.mark.parametrize("kind", ["nccl", "pinned"])
def test_a_killed_receiver_is_named(kind: str) -> None:
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    peer = killed(lambda: ShmReceiver(B, A, run_id).accept(5))
    base = ShmSender(A, B, run_id)
    base.connect(5)
    os.waitpid(peer, 0)
    sender = NcclSender(B, StageIOSpec(), base, Inline()) if kind == "nccl" else PinnedSender(B, base, Inline(), empty)
    with pytest.raises(TransportError, match=r"stage 1 \(rank 1\): connection lost while sending to it"):
        sender.send(label(0), [torch.zeros(1)])
    sender.close()


def test_nccl_keeps_buffers_until_they_have_left(base: tuple[ShmSender, ShmReceiver]) -> None:
    link, side = StageIOSpec(), Inline()
    side.open = False
    sender = NcclSender(B, link, base[0], side)
    x = torch.ones(3)
    sender.send(label(0), [x])
    x.zero_()
    with pytest.raises(TransportError, match=r"stage 1 \(rank 1\): .*micro-batch 0.* not received within 0\.02 s"):
        sender.flush(0.02)
    assert sender._flying[0][1][0].tolist() == [1, 1, 1]
    side.gates[0].passed = True
    sender.flush(1)
    assert not sender._flying


@pytest.mark.parametrize(("done", "closed"), [(True, 1), (False, 0)])
def test_nccl_never_closes_a_link_that_still_waits(
    base: tuple[ShmSender, ShmReceiver], done: bool, closed: int
) -> None:
    link, side = StageIOSpec(), Inline()
    side.open = done
    sender = NcclSender(B, link, base[0], side)
    sender.send(label(0), [torch.ones(3)])
    sender.close()
    assert link.closed == closed


def test_pinned_hands_over_when_the_copy_is_done(base: tuple[ShmSender, ShmReceiver]) -> None:
    side = Inline()
    side.open = False
    sender, receiver = PinnedSender(B, base[0], side, empty), PinnedReceiver(base[1], Inline())
    x = torch.arange(6.0)
    sender.send(label(0), [x])
    sender.send(label(1), [x + 1])
    x.zero_()
    receiver.post([expected(0, x), expected(1, x)])
    side.gates[1].passed = True
    sender.progress()
    assert sender.pending, "the first copy isn't done, and order is fixed"
    with pytest.raises(TransportError, match="did not come"):
        receiver.recv(label(0), 0.01)
    with pytest.raises(TransportError, match=r"micro-batch 0.* did not leave the GPU within 0\.01 s"):
        sender.flush(0.01)
    side.gates[0].passed = True
    sender.flush(1)
    assert not sender.pending
    assert receiver.recv(label(1), 1)[0].tolist() == [1, 2, 3, 4, 5, 6]
    assert receiver.recv(label(0), 1)[0].tolist() == [0, 1, 2, 3, 4, 5]


def test_pinned_copies_finish_while_the_device_waits() -> None:
    """A device that waits for a message hands over its own finished copies: the peer may be waiting for them."""
    run_id, progress, side = f"test-{uuid.uuid4().hex[:8]}", Progress(), Inline()
    receiver, raw = ShmReceiver(B, A, run_id, progress), ShmSender(A, B, run_id)
    raw.connect(1)
    receiver.accept(1)
    side.open = False
    sender = PinnedSender(B, raw, side, empty)
    progress.add(sender)
    sender.send(label(0), [torch.ones(3)])
    side.gates[0].passed = True
    receiver.post([expected(0, torch.ones(3))])
    assert receiver.recv(label(0), 1)[0].tolist() == [1, 1, 1]
    sender.close()
    receiver.close()


def test_snapshot_never_shares_memory() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    for view in (x, x.t(), x[1], x[:, ::2], x[0].expand(2, 4)):
        (copy,) = snapshot([view])
        assert torch.equal(copy, view)
        assert copy.is_contiguous()
        assert copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("size", [3, 3_000_000])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_on_a_gpu(size: int) -> None:
    """Through pinned memory and back, overwritten at once by later compute, while the host goes on."""
    run_id, progress, device = f"test-{uuid.uuid4().hex[:8]}", Progress(), torch.device("cuda", 0)
    raw_in, raw_out = ShmReceiver(B, A, run_id, progress, empty_pinned), ShmSender(A, B, run_id)
    raw_out.connect(1)
    raw_in.accept(1)
    sender, receiver = (
        PinnedSender(B, raw_out, CopyStream(device, "to 1")),
        PinnedReceiver(raw_in, CopyStream(device, "from 0")),
    )
    progress.add(sender)
    x = torch.zeros(size, device=device)
    receiver.post([expected(mb, x) for mb in range(10)])
    for mb in range(10):
        x.fill_(mb)
        sender.send(label(mb), [x])
    x.fill_(-1)
    for mb in range(10):
        got = receiver.recv(label(mb), 20)[0]
        assert got.device == device
        assert bool((got == mb).all())
    sender.flush(20)
    sender.close()
    receiver.close()
