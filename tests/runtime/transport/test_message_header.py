"""Headers, and messages cut into frames."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import TransportError
from raypipe.runtime.transport import message_header as wire
from raypipe.runtime.transport.channel import Expected, Label, Peer, TensorSpec
from raypipe.runtime.transport.framed.frame_channel import Assembly, FramePool, cut_frames, frames_of
from raypipe.runtime.transport.inbox import Inbox

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.uint16, torch.float8_e5m2]
number = st.integers(min_value=-1, max_value=2**40)
labels = st.builds(Label, st.sampled_from(["act", "grad"]), number, number, number, number, number)
specs = st.builds(TensorSpec, st.lists(st.integers(0, 2**40), max_size=5).map(tuple), st.sampled_from(DTYPES))
messages = st.builds(Expected, labels, st.lists(specs, max_size=4).map(tuple))


@given(messages)
def test_a_header_says_everything(message: Expected) -> None:
    assert wire.unpack(wire.pack(message.label, message.tensors) + b"rest") == message


@given(messages, messages)
def test_different_messages_have_different_headers(one: Expected, other: Expected) -> None:
    assert (wire.pack(*one) == wire.pack(*other)) == (one == other)


def test_a_damaged_header_is_an_error() -> None:
    head = wire.pack(Label("act", 0, 1, 2, 3), [TensorSpec((2, 2), torch.float32)])
    for bad in (b"", head[:-1], head[:-18] + b"\xff" + head[-17:]):
        with pytest.raises(TransportError, match="unreadable header"):
            wire.unpack(bad)


def test_a_dtype_that_cannot_travel() -> None:
    with pytest.raises(TransportError, match=r"torch\.qint8 cannot be sent"):
        wire.pack(Label("act", 0, 1, 2, 3), [((1,), torch.qint8)])


@given(
    capacity=st.integers(200, 400), sizes=st.lists(st.integers(0, 700), max_size=4), spare=st.sampled_from([0, 1, 7])
)
def test_frames_put_a_message_together_again(capacity: int, sizes: list[int], spare: int) -> None:
    label = Label("grad", 1, 0, 2, 3)
    tensors = [torch.randint(0, 255, (size + spare,), dtype=torch.uint8) for size in sizes]
    message = Expected(label, tuple(TensorSpec(tuple(t.shape), t.dtype) for t in tensors))
    pieces = [
        frame[:used].clone()
        for frame, used in cut_frames(wire.pack_tensors(label, tensors), tensors, FramePool(capacity))
    ]
    assert len(pieces) == frames_of(message, capacity)
    assert all(len(piece) <= capacity for piece in pieces)
    # What lies behind the bytes received is arbitrary.
    buffers = [torch.cat([piece, torch.full((capacity - len(piece),), 99, dtype=torch.uint8)]) for piece in pieces]
    inbox = Inbox(Peer(0, "n", "cpu"))
    inbox.post([message])
    assembly = Assembly(inbox, buffers[0])
    for buffer in buffers[1:]:
        assembly.add(buffer)
    assert all(torch.equal(a, b) for a, b in zip(assembly.tensors, tensors, strict=True))


def test_noise_in_a_frame_is_an_error_not_a_crash() -> None:
    inbox = Inbox(Peer(0, "n", "cpu"))
    inbox.post([Expected(Label("act", 0, 1, 2, 3), ())])
    with pytest.raises(TransportError):
        Assembly(inbox, torch.full((300,), 255, dtype=torch.uint8))


def test_a_header_larger_than_a_frame_is_an_error() -> None:
    with pytest.raises(TransportError, match="exceeds a frame"):
        list(cut_frames(bytes(500), [], FramePool(400)))
