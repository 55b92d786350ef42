"""The sending half of frame channels, with a transport that the test controls."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from raypipe.errors import TransportError
from raypipe.runtime.transport.channel import Label, Peer
from raypipe.runtime.transport.framed.frame_channel import FrameSender

B = Peer(1, "n", "cpu", "stage 1")


def label(mb: int) -> Label:
    return Label("act", 0, 1, mb, 0)


def test_flush_waits_for_every_frame_and_names_the_first_that_has_not_left() -> None:
    gates = [threading.Event() for _ in range(4)]
    started: list[Tensor] = []

    def start(frame: Tensor) -> threading.Event:
        started.append(frame.clone())
        return gates[len(started) - 1]

    sender = FrameSender(B, start, threading.Event.wait, frame_bytes=1000)
    sender.send(label(0), [torch.ones(100)])
    sender.send(label(1), [torch.ones(400)])
    sender.send(label(2), [torch.ones(100)])
    assert len(started) == 4, "sending never waits"
    for opened, stuck in ((0, 0), (1, 1), (2, 1), (3, 2)):
        with pytest.raises(TransportError, match=rf"stage 1 \(rank 1\): .*micro-batch {stuck}, .* within 0\.1 s"):
            sender.flush(0.1)
        gates[opened].set()
    sender.flush(5)
    sender.close()


def test_a_failure_in_the_thread_reaches_flush_and_the_next_send() -> None:
    def finish(frame: Tensor) -> None:
        raise RuntimeError("connection reset")

    sender = FrameSender(B, lambda frame: frame, finish)
    sender.send(label(0), [torch.ones(1)])
    for call in (lambda: sender.flush(5), lambda: sender.send(label(1), [torch.ones(1)])):
        with pytest.raises(TransportError, match=r"stage 1 \(rank 1\): connection lost while sending .*micro-batch 0"):
            call()
    sender.close()


def test_buffers_are_used_again() -> None:
    frames: list[int] = []

    def start(frame: Tensor) -> None:
        frames.append(frame.data_ptr())

    sender = FrameSender(B, start, lambda work: None)
    for mb in range(20):
        sender.send(label(mb), [torch.ones(10)])
        sender.flush(5)
    assert len(set(frames)) == 1
    sender.close()
