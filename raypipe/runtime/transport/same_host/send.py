"""Writing end of the same-host channel (``shared_memory`` says how it works)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import memmove, string_at
from functools import partial

from torch import Tensor

from raypipe.errors import TransportError
from raypipe.runtime.transport import message_header as wire
from raypipe.runtime.transport.channel import Label, Peer
from raypipe.runtime.transport.inbox import gone, who
from raypipe.runtime.transport.same_host.hand_over import call, give
from raypipe.runtime.transport.same_host.ring import Ring, capacity_for, directory, ring_file
from raypipe.runtime.transport.same_host.shared_memory import (
    FRAME,
    IN_RING,
    INLINE,
    INLINE_LIMIT,
    LARGEST_RING,
    LENGTH_BYTES,
    NEW_RING,
    PIPE_BYTES,
    SMALLEST_RING,
    edge_name,
)


class ShmSender:
    """``connect`` waits for the receiver to exist; sending never waits.

    ``ring_bytes`` is the first ring's capacity, rounded up to a power of two and halved where memory is short.
    """

    def __init__(self, me: Peer, peer: Peer, run_id: str, ring_bytes: int = 1 << 20) -> None:
        self._peer, self._name = peer, edge_name(run_id, me.rank, peer.rank)
        self._fd = -1
        self._socket: socket.socket | None = None
        self._ring: Ring | None = None
        self._first_capacity = capacity_for(0, max(SMALLEST_RING, 1 << (ring_bytes - 1).bit_length()))
        self._room_to_grow = True
        self._frames: deque[tuple[Label | None, bytes]] = deque()
        self._unplaced: deque[tuple[Label, bytes, list[Tensor], int]] = deque()
        self._failure: TransportError | None = None

    def connect(self, timeout_s: float) -> None:
        """Connect to the receiver and hand over a ring.

        Raises:
            TransportError: the receiver doesn't show up, or there is no memory for a ring.
        """
        self._socket = call(self._name, timeout_s)
        if self._socket is None:
            raise TransportError(who(self._peer), f"no connection within {timeout_s:g} s", "see that device's log")
        reading, self._fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._hand_over(reading)
        finally:
            os.close(reading)
        with contextlib.suppress(OSError, AttributeError):  # a pipe of the usual 64 KiB is only slower
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        capacity = self._first_capacity
        while not self._replace_ring(capacity):
            capacity //= 2
            if capacity < SMALLEST_RING:
                raise TransportError(
                    str(directory()),
                    f"no room for a ring of {SMALLEST_RING} bytes",
                    "enlarge it, or use transport: gloo",
                )

    def send(self, label: Label, tensors: Sequence[Tensor]) -> None:
        """See Sender.send.

        Raises:
            TransportError: the peer is gone, or the message needs more shared memory than there is.
        """
        if self._failure is not None:
            raise self._failure
        blocks, head, nbytes = _packed(label, tensors)
        if self._unplaced or not self._place(label, head, blocks, nbytes):
            # The caller may overwrite its tensors now. A block that `dense` made is ours already.
            copies = [b.clone() if b is t else b for b, t in zip(blocks, tensors, strict=True)]
            self._unplaced.append((label, head, copies, nbytes))
            self.progress()

    def prepare(self, label: Label, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """See Prepares.prepare. Made ready is what travels in the pipe; a place in the ring is given when sent."""
        blocks, head, nbytes = _packed(label, tensors)
        if nbytes > INLINE_LIMIT or any(b is not t for b, t in zip(blocks, tensors, strict=True)):
            return partial(self.send, label, tensors)
        front = FRAME.pack(FRAME.size - LENGTH_BYTES + len(head) + nbytes, INLINE, len(head))

        def send() -> None:
            if self._unplaced or self._failure is not None:
                self.send(label, tensors)
            else:
                self._push(label, front + _inline(head, blocks))

        return send

    @property
    def pending(self) -> bool:
        """Whether a message waits in this process."""
        return bool(self._frames or self._unplaced)

    def progress(self) -> None:
        """See Sender.progress."""
        while self._frames:
            label, frame = self._frames[0]
            written = self._write(frame)
            if written < len(frame):
                self._frames[0] = (label, frame[written:])
                return
            self._frames.popleft()
        while self._unplaced and self._place(*self._unplaced[0]):
            self._unplaced.popleft()

    def flush(self, timeout_s: float) -> None:
        """See Sender.flush. A message has left when it is in the ring and its header in the pipe."""
        if self._failure is not None:
            raise self._failure
        deadline = time.monotonic() + timeout_s
        self.progress()
        while self.pending:
            if time.monotonic() > deadline:
                stuck = [label for label, _ in self._frames if label] or [self._unplaced[0][0]]
                raise TransportError(
                    who(self._peer),
                    f"{stuck[0]} could not be delivered within {timeout_s:g} s",
                    "look at that device: it has stopped reading",
                )
            time.sleep(0.0005)
            self.progress()

    def close(self) -> None:
        """See Sender.close."""
        self._frames.clear()
        self._unplaced.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._socket is not None:
            self._socket.close()
        if self._ring is not None:
            self._ring.close()
        self._failure = self._failure or TransportError(who(self._peer), "the channel is closed", "open it again")

    def _place(self, label: Label, head: bytes, blocks: list[Tensor], nbytes: int) -> bool:
        """Put a message in the pipe or the ring. Returns False if it has to wait for room."""
        if nbytes <= INLINE_LIMIT:
            self._emit(label, INLINE, len(head), _inline(head, blocks))
            return True
        position = self._reserve(label, nbytes)
        if position is None:
            return False
        assert self._ring is not None
        address = self._ring.address(position)
        for block in blocks:
            size = block.nbytes
            memmove(address, block.data_ptr(), size)
            address += size
        self._emit(label, IN_RING, position, head)
        return True

    def _reserve(self, label: Label, nbytes: int) -> int | None:
        ring = self._ring
        if ring is None:
            raise TransportError(who(self._peer), "the channel is not open", "connect() it before sending")
        fits = ring.holds(nbytes)
        position = ring.place(nbytes) if fits else None
        if position is not None:
            return position
        larger = capacity_for(nbytes, 2 * ring.capacity)
        if self._room_to_grow and (larger <= LARGEST_RING or not fits):
            grown = self._replace_ring(larger)
            if grown is not None:
                return grown.place(nbytes)
        if not fits:
            raise TransportError(
                str(directory()),
                f"no room for a ring that holds the {nbytes} bytes of {label}",
                "enlarge it (Docker: --shm-size), or use transport: gloo",
            )
        return None

    def _replace_ring(self, capacity: int) -> Ring | None:
        """Make and announce a ring; the reader drains the old one first. Returns None if there is no memory for it."""
        try:
            file = ring_file(capacity)
        except OSError:
            # Not tried again on every send; at opening, a smaller one is tried.
            self._room_to_grow = self._ring is None
            return None
        try:
            ring = Ring(file, capacity)
            self._hand_over(file)
        finally:
            os.close(file)
        if self._ring is not None:
            self._ring.close()
        self._ring = ring
        self._emit(None, NEW_RING, capacity, b"")
        return ring

    def _hand_over(self, file: int) -> None:
        assert self._socket is not None
        try:
            give(self._socket, [file])
        except OSError:
            raise self._lost() from None

    def _emit(self, label: Label | None, kind: int, number: int, body: bytes) -> None:
        self._push(label, FRAME.pack(FRAME.size - LENGTH_BYTES + len(body), kind, number) + body)

    def _push(self, label: Label | None, frame: bytes) -> None:
        written = self._write(frame) if not self._frames else 0
        if written < len(frame):
            self._frames.append((label, frame[written:]))

    def _write(self, frame: bytes) -> int:
        try:
            return os.write(self._fd, frame)
        except BlockingIOError:
            return 0
        except BrokenPipeError:
            raise self._lost() from None

    def _lost(self) -> TransportError:
        self._frames.clear()
        self._unplaced.clear()
        self._failure = gone(self._peer, "sending to it")
        return self._failure


def _packed(label: Label, tensors: Sequence[Tensor]) -> tuple[list[Tensor], bytes, int]:
    """Return dense blocks of the tensors, the message's header, and the number of bytes of the blocks."""
    blocks = [wire.dense(t) for t in tensors]
    nbytes = 0
    for block in blocks:
        nbytes += block.nbytes
    return blocks, wire.pack_tensors(label, blocks), nbytes


def _inline(head: bytes, blocks: list[Tensor]) -> bytes:
    return b"".join([head, *(string_at(b.data_ptr(), b.nbytes) for b in blocks if b.nbytes)])
