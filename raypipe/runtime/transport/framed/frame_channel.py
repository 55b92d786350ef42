"""The base of channels that send frames: those of Gloo, and those whose send and receive block (``ray_collective``).

Gloo aborts the process when a message is larger than the buffer it arrives in, and hands over whatever came when it is
smaller. So messages are cut into frames of one capacity, which fit every buffer, and the first frame of a message
carries the header, which is checked before anything else is believed: a wrong size, dtype or label becomes a
TransportError. The stream of a message is: length of its header, the header (``wire``), then the tensors' bytes.

A transport supplies two functions for sending a frame - ``start`` in the caller's thread, ``finish`` in a thread of the
edge, where it may block - and a way to wait for the next frame.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from ctypes import memmove, string_at
from typing import Generic, TypeVar

import torch
from torch import Tensor

from raypipe.errors import TransportError
from raypipe.runtime.transport import message_header as wire
from raypipe.runtime.transport.channel import Expected, Label, Peer, Progress
from raypipe.runtime.transport.inbox import Allocate, Inbox, empty, gone, who

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


def cut_frames(head: bytes, tensors: Sequence[Tensor], pool: FramePool) -> Iterator[tuple[Tensor, int]]:
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


def frames_of(expected: Expected, frame_bytes: int) -> int:
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


T = TypeVar("T")


class FrameSender(Generic[T]):
    """Cuts messages into frames; ``frame_bytes`` must agree with the other end.

    Args:
        peer: the receiver.
        start: begin to send a uint8 tensor, without waiting; an exception means that the peer is gone.
        finish: wait, in a thread, until what ``start`` returned has been sent; likewise.
    """

    def __init__(
        self,
        peer: Peer,
        start: Callable[[Tensor], T],
        finish: Callable[[T], object],
        frame_bytes: int = FRAME_BYTES,
    ) -> None:
        self._peer, self._start, self._finish = peer, start, finish
        self._pool = FramePool(frame_bytes)
        self._flying: queue.SimpleQueue[tuple[Label, Tensor, T] | None] = queue.SimpleQueue()
        self._labels: deque[Label] = deque()
        self._landed = threading.Condition()
        self._failure: TransportError | None = None
        # A daemon, because after a failure it may stay in `finish` until the process ends.
        threading.Thread(target=self._run, name=f"send to rank {peer.rank}", daemon=True).start()

    def send(self, label: Label, tensors: Sequence[Tensor]) -> None:
        """See Sender.send. Raises TransportError when the peer is gone."""
        if self._failure is not None:
            raise self._failure
        blocks = [wire.dense(t) for t in tensors]
        for frame, used in cut_frames(wire.pack_tensors(label, blocks), blocks, self._pool):
            try:
                started = self._start(frame[:used])
            except Exception as error:
                self._failure = gone(self._peer, f"sending {label}")
                raise self._failure from error
            with self._landed:
                self._labels.append(label)
            self._flying.put((label, frame, started))

    @property
    def pending(self) -> bool:
        """Always False, because a thread of the channel sends everything."""
        return False

    def progress(self) -> None:
        """Do nothing: see ``pending``."""

    def flush(self, timeout_s: float) -> None:
        """See Sender.flush. A message has left when the peer has received it: sends meet receives here."""
        deadline = time.monotonic() + timeout_s
        with self._landed:
            while self._labels and self._failure is None:
                if not self._landed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise TransportError(
                        who(self._peer),
                        f"{self._labels[0]} was not received within {timeout_s:g} s",
                        "look at that device: it has stopped reading",
                    )
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """See Sender.close."""
        self._failure = self._failure or TransportError(who(self._peer), "the channel is closed", "open it again")
        self._flying.put(None)

    def _run(self) -> None:
        while (item := self._flying.get()) is not None:
            label, frame, started = item
            try:
                self._finish(started)
            except Exception:
                with self._landed:
                    self._failure = self._failure or gone(self._peer, f"sending {label}")
                    self._landed.notify_all()
                return
            self._pool.put(frame)
            with self._landed:
                self._labels.popleft()
                if not self._labels:
                    self._landed.notify_all()


class FrameReceiver(ABC):
    """Puts messages together from frames that a subclass waits for.

    Args:
        peer: the sender.
        progress: this device's own senders, pushed while it waits.
        allocate: makes the received tensors.
    """

    def __init__(self, peer: Peer, progress: Progress | None = None, allocate: Allocate = empty) -> None:
        self._peer = peer
        self._inbox = Inbox(peer)
        self._progress, self._allocate = progress or Progress(), allocate
        self._pool = FramePool()
        self._counts: deque[int] = deque()  # frames of each message that must still come

    def post(self, expected: Sequence[Expected]) -> None:
        """See Receiver.post."""
        self._inbox.post(expected)
        counts = [frames_of(message, self._pool.frame_bytes) for message in expected]
        self._counts.extend(counts)
        self._announce(sum(counts))

    def recv(self, label: Label, timeout_s: float) -> list[Tensor]:
        """See Receiver.recv. A timeout ends the channel: what is half put together can't be taken up again."""
        deadline = time.monotonic() + timeout_s
        while True:
            tensors = self._inbox.take(label)
            if tensors is not None:
                return tensors
            frame = self._next(label, deadline, timeout_s)
            message = Assembly(self._inbox, frame, self._allocate)
            self._pool.put(frame)
            for _ in range(self._counts.popleft() - 1):
                frame = self._next(label, deadline, timeout_s)
                message.add(frame)
                self._pool.put(frame)
            self._inbox.keep(message.label, message.tensors)

    def _next(self, label: Label, deadline: float, timeout_s: float) -> Tensor:
        try:
            return self._next_frame(deadline)
        except TimeoutError:
            self._inbox.fail(self._inbox.late(label, timeout_s))
        except ConnectionError:
            self._inbox.fail(gone(self._peer, f"waiting for {label}"))

    @abstractmethod
    def close(self) -> None:
        """See Receiver.close."""

    @abstractmethod
    def _announce(self, count: int) -> None:
        """Expect ``count`` more frames."""

    @abstractmethod
    def _next_frame(self, deadline: float) -> Tensor:
        """Wait for the next frame, pushing ``self._progress`` meanwhile. Raises TimeoutError or ConnectionError."""
