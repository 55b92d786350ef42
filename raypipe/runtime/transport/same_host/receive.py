"""Reading end of the same-host channel (``shared_memory`` says how it works)."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Sequence
from ctypes import memmove

from torch import Tensor

from raypipe.errors import TransportError
from raypipe.runtime.transport.channel import Expected, Label, Peer
from raypipe.runtime.transport.inbox import Allocate, Inbox, empty, gone, who
from raypipe.runtime.transport.same_host.hand_over import answer, listen, take
from raypipe.runtime.transport.same_host.ring import Ring
from raypipe.runtime.transport.same_host.shared_memory import FRAME, IN_RING, LENGTH_BYTES, NEW_RING, edge_name
from raypipe.runtime.transport.waiting import PUSH_EVERY_S, Progress

_READ_BYTES = 1 << 16
HANDED_OVER_S = 1.0
"""Longest wait for the file of a ring, which was handed over before the ring was announced."""


class ShmReceiver:
    """Making it never blocks, so that all receivers of a run can exist before any sender looks for one.

    Raises TransportError when it cannot listen.
    """

    def __init__(
        self, me: Peer, peer: Peer, run_id: str, progress: Progress | None = None, allocate: Allocate = empty
    ) -> None:
        self._peer = peer
        self._inbox = Inbox(peer)
        self._progress, self._allocate = progress or Progress(), allocate
        self._ring: Ring | None = None
        self._bytes, self._at = b"", 0
        self._fd = -1
        self._poll = select.poll()
        try:
            self._socket = listen(edge_name(run_id, peer.rank, me.rank))
        except OSError as error:
            raise TransportError(who(peer), f"cannot listen for it: {error.strerror}", "use transport: gloo") from None

    def accept(self, timeout_s: float) -> None:
        """Wait until the sender has connected and handed over its ring. Raises TransportError if it doesn't."""
        deadline = time.monotonic() + timeout_s
        if self._fd < 0:
            self._connect(timeout_s)
        while self._ring is None:
            if not self._next_frame() and not self._read(deadline):
                raise self._unconnected(timeout_s)

    def _connect(self, timeout_s: float) -> None:
        connection = answer(self._socket, timeout_s)
        if connection is None:
            raise self._unconnected(timeout_s)
        self._socket.close()
        self._socket = connection
        try:
            (self._fd,) = take(connection, 1, timeout_s)
        except TimeoutError:
            raise self._unconnected(timeout_s) from None
        except OSError:
            self._inbox.fail(gone(self._peer, "waiting for it"))
        self._poll.register(self._fd, select.POLLIN)

    def _unconnected(self, timeout_s: float) -> TransportError:
        return TransportError(who(self._peer), f"no connection within {timeout_s:g} s", "see that device's log")

    def post(self, expected: Sequence[Expected]) -> None:
        """See Receiver.post."""
        self._inbox.post(expected)

    def recv(self, label: Label, timeout_s: float) -> list[Tensor]:
        """See Receiver.recv. The tensors own their memory; after a timeout the message can be asked for again."""
        deadline = 0.0
        while True:
            tensors = self._inbox.take(label)
            if tensors is not None:
                return tensors
            if self._next_frame():
                continue
            deadline = deadline or time.monotonic() + timeout_s
            if not self._read(deadline):
                raise self._inbox.late(label, timeout_s)

    def take_in(self) -> None:
        """See TakesIn.take_in."""
        with contextlib.suppress(TransportError):  # the inbox remembers it
            if self._read(0.0):
                # A peer that commits an update earlier sends what comes after the head before this device announces it.
                while self._inbox.upcoming is not None and self._next_frame():
                    pass

    def close(self) -> None:
        """See Receiver.close."""
        self._socket.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._ring is not None:
            self._ring.close()

    def _read(self, deadline: float) -> bool:
        """Read more of the pipe; sleep until there is something. Returns False at the deadline."""
        while True:
            data = b""
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                pass
            except OSError:
                self._inbox.fail(TransportError(who(self._peer), "the channel is closed", "open it again"))
            if data:
                self._bytes = self._bytes[self._at :] + data
                self._at = 0
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            # While something of ours is stuck, look after it often: the peer may be waiting for just that.
            stuck = self._progress.push()
            events = self._poll.poll(0 if stuck else left_s * 1000)
            if stuck and not events:
                time.sleep(PUSH_EVERY_S)
            # A hang-up with nothing left to read.
            if events and not events[0][1] & select.POLLIN:
                ahead = self._inbox.upcoming
                self._inbox.fail(gone(self._peer, f"waiting for {ahead.label}" if ahead else "waiting for it"))

    def _next_frame(self) -> bool:
        """Take one whole frame out of what was read. Returns False if there is none."""
        data, at = self._bytes, self._at
        if len(data) - at < FRAME.size:
            return False
        length, kind, number = FRAME.unpack_from(data, at)
        end = at + LENGTH_BYTES + length
        if len(data) < end:
            return False
        self._at = end
        at += FRAME.size
        if kind == IN_RING:
            self._take_from_ring(data[at:end], number)
        elif kind == NEW_RING:
            self._open_ring(number)
        else:
            self._take_inline(data[at : at + number], data[at + number : end])
        return True

    def _take_from_ring(self, head: bytes, position: int) -> None:
        message = self._inbox.accept(head)
        assert self._ring is not None  # accept() waited for it
        start = address = self._ring.address(position)
        tensors = []
        for spec in message.tensors:
            tensor = self._allocate(spec.shape, spec.dtype)
            memmove(tensor.data_ptr(), address, tensor.nbytes)
            address += tensor.nbytes
            tensors.append(tensor)
        self._ring.release(position, address - start)
        self._inbox.keep(message.label, tensors)

    def _take_inline(self, head: bytes, payload: bytes) -> None:
        message = self._inbox.accept(head)
        tensors = []
        at = 0
        for spec in message.tensors:
            tensor = self._allocate(spec.shape, spec.dtype)
            size = tensor.nbytes
            memmove(tensor.data_ptr(), payload[at : at + size], size)
            at += size
            tensors.append(tensor)
        self._inbox.keep(message.label, tensors)

    def _open_ring(self, capacity: int) -> None:
        if self._ring is not None:
            self._ring.close()  # everything in it was read: those frames came before this one
        try:
            (fd,) = take(self._socket, 1, HANDED_OVER_S)
            try:
                self._ring = Ring(fd, capacity)
            finally:
                os.close(fd)
        except OSError as error:
            why = f"cannot map its ring of {capacity} bytes: {error}"
            self._inbox.fail(TransportError(who(self._peer), why, "use transport: gloo"))
