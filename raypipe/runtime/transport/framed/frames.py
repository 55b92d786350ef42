"""Cuts messages into frames of one capacity, for transports whose receive buffers must be large enough.

Gloo aborts the process when a message is larger than the buffer it arrives in, and hands over whatever came when
it is smaller. So every frame fits every buffer, and the first one of a message carries the header, which is checked
before anything else is believed: a wrong size, dtype or label becomes a TransportError.

The stream of a message is: length of its header, the header (``wire``), then the tensors' bytes one after the other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from ctypes import memmove, string_at

import torch
from torch import Tensor

from raypipe.errors import TransportError
from raypipe.runtime.transport import message_header as wire
from raypipe.runtime.transport.channel import Expected
from raypipe.runtime.transport.inbox import Allocate, Inbox, empty

FRAME_BYTES = (4 << 20) + 4096
"""Capacity of a frame: 4 MiB and room for a header. Both ends must use the same; only what is used takes memory."""
_LENGTH = struct.Struct("<I")


class FramePool:
    """Buffers of one frame each. They are reused, because their pages are in memory already."""

    def __init__(self, frame_bytes: int = FRAME_BYTES) -> None:
        self.frame_bytes = frame_bytes
        self._free: list[Tensor] = []

    def get(self) -> Tensor:
        """A uint8 tensor of ``frame_bytes``; its contents are arbitrary."""
        # pop() on a list is atomic, so threads may share a pool.
        try:
            return self._free.pop()
        except IndexError:
            return torch.empty(self.frame_bytes, dtype=torch.uint8)

    def put(self, frame: Tensor) -> None:
        """Return a buffer to the pool."""
        self._free.append(frame)


def cut(head: bytes, tensors: Sequence[Tensor], pool: FramePool) -> Iterator[tuple[Tensor, int]]:
    """Copy a message into frames: pairs of a buffer and the number of bytes used in it.

    ``tensors`` are dense (``wire.dense``) CPU tensors.
    """
    capacity = pool.frame_bytes
    start = _LENGTH.pack(len(head)) + head
    if len(start) > capacity:
        raise TransportError(
            "message", f"its header of {len(start)} bytes exceeds a frame", "send fewer tensors at once"
        )
    frame = pool.get()
    memmove(frame.data_ptr(), start, len(start))
    used = len(start)
    for tensor in tensors:
        done, size = 0, tensor.nbytes
        while done < size:
            if used == capacity:
                yield frame, used
                frame, used = pool.get(), 0
            part = min(size - done, capacity - used)
            memmove(frame.data_ptr() + used, tensor.data_ptr() + done, part)
            done += part
            used += part
    yield frame, used


def count(expected: Expected, frame_bytes: int) -> int:
    """Number of frames the message takes."""
    size = _LENGTH.size + len(wire.pack(expected.label, expected.tensors)) + sum(s.nbytes for s in expected.tensors)
    return max(1, -(-size // frame_bytes))


class Assembly:
    """One message being put together from its frames, in order."""

    def __init__(self, inbox: Inbox, first: Tensor, allocate: Allocate = empty) -> None:
        address = first.data_ptr()
        (length,) = _LENGTH.unpack(string_at(address, _LENGTH.size))
        # Checked before the length is believed for anything but reading within the frame.
        length = min(length, first.nbytes - _LENGTH.size)
        message = inbox.accept(string_at(address + _LENGTH.size, length))
        self.label = message.label
        self.tensors = [allocate(spec.shape, spec.dtype) for spec in message.tensors]
        self._parts = [(t.data_ptr(), t.nbytes) for t in self.tensors if t.nbytes]
        self._add(first, _LENGTH.size + length)

    def add(self, frame: Tensor) -> None:
        """Copy the next frame's bytes to where they belong."""
        self._add(frame, 0)

    def _add(self, frame: Tensor, used: int) -> None:
        address, capacity = frame.data_ptr(), frame.nbytes
        while self._parts and used < capacity:
            target, size = self._parts[0]
            part = min(size, capacity - used)
            memmove(target, address + used, part)
            used += part
            if part == size:
                self._parts.pop(0)
            else:
                self._parts[0] = (target + part, size - part)
