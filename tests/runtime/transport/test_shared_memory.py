"""The same-host channel where memory or the reader is the problem; both ends in one process."""

from __future__ import annotations

import errno
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raypipe.errors import TransportError
from raypipe.runtime.transport.channel import Expected, Label, Peer, Progress, TensorSpec
from raypipe.runtime.transport.same_host import ring, shm
from raypipe.runtime.transport.same_host.ring import directory
from raypipe.runtime.transport.same_host.shm import (
    INLINE_LIMIT,
    LARGEST_RING,
    SMALLEST_RING,
    ShmReceiver,
    ShmSender,
    edge_name,
)

A, B = Peer(0, "n", "cpu", "stage 0"), Peer(1, "n", "cpu", "stage 1")


def label(mb: int) -> Label:
    return Label("act", 0, 1, mb, 0)


def expected(mb: int, x: torch.Tensor) -> Expected:
    return Expected(label(mb), (TensorSpec(tuple(x.shape), x.dtype),))


@pytest.fixture
def run_id() -> str:
    return f"test-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def ends(run_id: str) -> Iterator[tuple[ShmSender, ShmReceiver]]:
    receiver, sender = ShmReceiver(B, A, run_id), ShmSender(A, B, run_id)
    sender.connect(1)
    receiver.accept(1)
    yield sender, receiver
    sender.close()
    receiver.close()


def test_a_slow_reader_makes_the_ring_grow_not_the_sender_wait(ends: tuple[ShmSender, ShmReceiver]) -> None:
    sender, receiver = ends
    x = torch.arange(10_000.0)
    for mb in range(50):
        sender.send(label(mb), [x + mb])
        assert not sender.pending
    receiver.post([expected(mb, x) for mb in range(50)])
    for mb in range(50):
        assert torch.equal(receiver.recv(label(mb), 1)[0], x + mb)
    # The ring is large enough now: another round takes no more memory.
    assert sender._ring is not None
    grown = sender._ring.capacity
    for mb in range(50, 100):
        sender.send(label(mb), [x + mb])
    receiver.post([expected(mb, x) for mb in range(50, 100)])
    for mb in range(50, 100):
        assert torch.equal(receiver.recv(label(mb), 1)[0], x + mb)
    assert sender._ring.capacity == grown


def refuse_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ring, "_reserve", full)


def test_without_memory_messages_wait_in_the_sender(
    ends: tuple[ShmSender, ShmReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_memory(monkeypatch)
    sender, receiver = ends
    x = torch.zeros(5000)
    for mb in range(20):
        x.fill_(mb)
        sender.send(label(mb), [x])
    x.fill_(-1)
    assert sender.pending
    with pytest.raises(TransportError, match=r"stage 1 \(rank 1\): activation of micro-batch \d+, .* 0.05 s"):
        sender.flush(0.05)
    receiver.post([expected(mb, x) for mb in range(20)])
    for mb in range(20):
        assert bool((receiver.recv(label(mb), 1)[0] == mb).all())
        sender.progress()
    sender.flush(1)
    assert not sender.pending


def test_whoever_waits_pushes_its_own_messages(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message stuck in this device's sender gets out while the device waits for another one."""
    progress = Progress()
    receiver = ShmReceiver(B, A, run_id, progress)
    sender = ShmSender(A, B, run_id)
    sender.connect(1)
    receiver.accept(1)
    refuse_memory(monkeypatch)
    progress.add(sender)  # the device sends to itself, so that its own stuck messages are what it waits for
    x = torch.ones(5000)
    for mb in range(20):
        sender.send(label(mb), [x])
    receiver.post([expected(mb, x) for mb in range(20)])
    assert receiver.recv(label(19), 2)[0].sum() == 5000
    sender.close()
    receiver.close()


def test_a_message_that_can_never_fit_is_an_error(
    ends: tuple[ShmSender, ShmReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_memory(monkeypatch)
    with pytest.raises(TransportError, match=r"400000 bytes of activation of micro-batch 7(.|\n)*--shm-size"):
        ends[0].send(label(7), [torch.zeros(100_000)])


def test_a_message_larger_than_the_largest_ring_still_travels(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "LARGEST_RING", SMALLEST_RING)
    receiver, sender = ShmReceiver(B, A, run_id), ShmSender(A, B, run_id)
    sender.connect(1)
    receiver.accept(1)
    x = torch.arange(200_000, dtype=torch.int32)
    sender.send(label(0), [x])
    receiver.post([expected(0, x)])
    assert torch.equal(receiver.recv(label(0), 1)[0], x)
    sender.close()
    receiver.close()
    assert LARGEST_RING > SMALLEST_RING


def test_opening_without_any_memory_says_so(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_memory(monkeypatch)
    receiver, sender = ShmReceiver(B, A, run_id), ShmSender(A, B, run_id)
    with pytest.raises(TransportError, match="no room for a ring of 65536 bytes"):
        sender.connect(1)
    sender.close()
    receiver.close()


def test_a_full_pipe_waits_in_the_sender(ends: tuple[ShmSender, ShmReceiver]) -> None:
    sender, receiver = ends
    x = torch.arange(INLINE_LIMIT // 8, dtype=torch.int64)
    count = 2000  # 4 MB through a pipe of at most 1 MiB
    for mb in range(count):
        sender.send(label(mb), [x + mb])
    assert sender.pending
    receiver.post([expected(mb, x) for mb in range(count)])
    for mb in range(count):
        sender.progress()
        assert torch.equal(receiver.recv(label(mb), 1)[0], x + mb)
    sender.flush(1)


def test_what_was_sent_before_the_sender_closed_still_arrives(ends: tuple[ShmSender, ShmReceiver]) -> None:
    sender, receiver = ends
    x = torch.arange(10_000.0)
    sender.send(label(0), [x])
    sender.send(label(1), [x + 1])
    sender.close()
    receiver.post([expected(mb, x) for mb in range(3)])
    assert torch.equal(receiver.recv(label(1), 1)[0], x + 1)
    assert torch.equal(receiver.recv(label(0), 1)[0], x)
    with pytest.raises(TransportError, match=r"stage 0 \(rank 0\): connection lost while waiting for .*micro-batch 2"):
        receiver.recv(label(2), 30)


def test_a_late_message_can_be_asked_for_again(ends: tuple[ShmSender, ShmReceiver]) -> None:
    sender, receiver = ends
    receiver.post([expected(0, torch.zeros(1))])
    with pytest.raises(TransportError, match=r"did not come within 0\.01 s"):
        receiver.recv(label(0), 0.01)
    sender.send(label(0), [torch.ones(1)])
    assert receiver.recv(label(0), 1)[0].item() == 1


def test_nobody_at_the_other_end(run_id: str) -> None:
    sender = ShmSender(A, B, run_id)
    with pytest.raises(TransportError, match=r"stage 1 \(rank 1\): no connection within 0.02 s"):
        sender.connect(0.02)
    receiver = ShmReceiver(B, A, run_id)
    with pytest.raises(TransportError, match=r"stage 0 \(rank 0\): no connection within 0.02 s"):
        receiver.accept(0.02)
    receiver.close()
    with pytest.raises(TransportError, match="not open"):
        sender.send(label(0), [torch.zeros(10_000)])


def test_nothing_ever_has_a_name_in_a_file_system(run_id: str) -> None:
    """So whichever end is killed, and whenever, there is nothing to remove."""
    x = torch.zeros(50_000)

    def named() -> set[Path]:
        return {path for folder in (directory(), Path(tempfile.gettempdir())) for path in folder.glob(f"*{run_id}*")}

    receiver, sender = ShmReceiver(B, A, run_id), ShmSender(A, B, run_id)
    before = set(directory().iterdir())
    sender.connect(1)
    assert not named()
    receiver.accept(1)
    for mb in range(9):
        sender.send(label(mb), [x])  # the ring grows
    assert not named()
    assert set(directory().iterdir()) <= before
    sender.close()
    receiver.close()


@pytest.mark.parametrize("connected", [False, True])
def test_a_sender_that_dies_while_opening_is_named(run_id: str, connected: bool) -> None:
    receiver = ShmReceiver(B, A, run_id)
    process = os.fork()
    if process == 0:
        if connected:
            ring.call(edge_name(run_id, 0, 1), 5)
        os._exit(9)  # as a killed process: nothing is closed in order
    os.waitpid(process, 0)
    begun = time.monotonic()
    with pytest.raises(TransportError, match=r"stage 0 \(rank 0\): (connection lost|no connection within 0\.2 s)"):
        receiver.accept(0.2)
    assert time.monotonic() - begun < 3
    receiver.close()


def test_a_receiver_that_closes_before_it_accepts_is_named(run_id: str) -> None:
    receiver, sender = ShmReceiver(B, A, run_id), ShmSender(A, B, run_id)
    sender.connect(1)
    receiver.close()
    with pytest.raises(TransportError, match=r"stage 1 \(rank 1\): connection lost"):
        sender.send(label(0), [torch.ones(1)])
    sender.close()


def test_a_name_is_taken_once(run_id: str) -> None:
    first = ShmReceiver(B, A, run_id)
    with pytest.raises(TransportError, match="Address already in use"):
        ShmReceiver(B, A, run_id)
    first.close()


def test_prepared_messages_carry_what_the_tensors_hold_when_sent(ends: tuple[ShmSender, ShmReceiver]) -> None:
    """Small, large and strided ones, in the order of sending, mixed with others."""
    sender, receiver = ends
    tensors = [torch.zeros(4), torch.zeros(10_000), torch.zeros(3, 2).t()]
    ready = [sender.prepare(label(mb), [x]) for mb, x in enumerate(tensors)]
    receiver.post([*(expected(mb, x) for mb, x in enumerate(tensors)), expected(3, tensors[0])])
    receiver.take_in()
    assert receiver._inbox.upcoming == expected(0, tensors[0])  # nothing has left yet
    for mb, x in enumerate(tensors):
        x += mb + 1
        ready[mb]()
        x.zero_()
    sender.send(label(3), [tensors[0]])
    assert torch.equal(receiver.recv(label(3), 1)[0], torch.zeros(4))
    for mb, x in enumerate(tensors):
        assert torch.equal(receiver.recv(label(mb), 1)[0], torch.full(x.shape, mb + 1.0))


def test_a_prepared_message_waits_behind_one_that_found_no_room(
    ends: tuple[ShmSender, ShmReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = ends
    refuse_memory(monkeypatch)
    large, small = torch.arange(6_000.0), torch.arange(3.0)
    behind = sender.prepare(label(3), [small])
    for mb in range(3):
        sender.send(label(mb), [large + mb])
    assert sender.pending
    behind()
    receiver.post([*(expected(mb, large) for mb in range(3)), expected(3, small)])
    for mb in range(3):
        assert torch.equal(receiver.recv(label(mb), 1)[0], large + mb)
        sender.progress()
    assert torch.equal(receiver.recv(label(3), 1)[0], small)


def test_taking_in_leaves_messages_that_are_not_announced_yet(ends: tuple[ShmSender, ShmReceiver]) -> None:
    """A peer may have committed its update already, while this device still runs the head of the same step."""
    sender, receiver = ends
    x = torch.arange(4.0)
    for mb in range(2):
        sender.send(label(mb), [x + mb])
    receiver.take_in()
    receiver.post([expected(0, x)])
    receiver.take_in()
    receiver.post([expected(1, x)])
    for mb in range(2):
        assert torch.equal(receiver.recv(label(mb), 1)[0], x + mb)


def test_taking_in_waits_for_nothing_and_leaves_errors_to_recv(ends: tuple[ShmSender, ShmReceiver]) -> None:
    sender, receiver = ends
    x = torch.arange(4.0)
    receiver.post([expected(0, x), expected(1, x)])
    receiver.take_in()
    sender.send(label(0), [x])
    receiver.take_in()
    assert receiver._inbox.upcoming == expected(1, x)  # 0 is in
    sender.send(label(7), [x])
    receiver.take_in()
    assert torch.equal(receiver.recv(label(0), 1)[0], x)
    with pytest.raises(TransportError, match="expected activation of micro-batch 1"):
        receiver.recv(label(1), 1)
