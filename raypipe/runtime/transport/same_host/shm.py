"""Same-host channel for CPU tensors: payload in shared memory, headers in a pipe that also wakes the reader.

One pipe and one buffer (``ring``) per directed edge. The reader listens (``ring.listen``); the writer makes both, and
hands over the pipe's other end and the buffer's file. Neither has a name in a file system, so a run that is killed
leaves nothing behind. A pipe whose other end is closed says so at once: so either side learns of its peer's death.

A frame in the pipe is: length of what follows, kind, a number, then a body.

=========  =============================  =====================================
kind       number                         body
=========  =============================  =====================================
INLINE     length of the header           header (``wire``), then the payload
IN_RING    position of the payload        header
=========  =============================  =====================================

When the buffer is full it grows, so that sending needs no room made by a slow reader; only what cannot be placed even
so waits in the sender.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import memmove, string_at
from functools import partial

from torch import Tensor

from raypipe.errors import TransportError
from raypipe.runtime.transport import message_header as wire
from raypipe.runtime.transport.channel import PUSH_EVERY_S, Expected, Label, Peer, Progress
from raypipe.runtime.transport.inbox import Allocate, Inbox, empty, gone, who
from raypipe.runtime.transport.same_host.ring import Ring, answer, call, capacity_for, directory, give, listen, take
from raypipe.runtime.transport.transport import Edge, Ends, Opening, Transport

FRAME = struct.Struct("=IBq")
LENGTH_BYTES = 4
INLINE, IN_RING = range(2)

INLINE_LIMIT = 2048
"""Payloads up to this many bytes travel in the pipe: cheaper than placing them in the ring."""
PIPE_BYTES = 1 << 20
SMALLEST_RING = 1 << 16
LARGEST_RING = 1 << 28
"""A buffer stops growing for depth here; a message larger than half of it still gets the room it needs."""


def edge_name(run_id: str, src: int, dst: int) -> str:
    """Return the name under which the reader of an edge listens."""
    return f"{run_id}-{src}-{dst}"


class ShmSender:
    """``connect`` waits for the receiver to exist; sending never waits."""

    def __init__(self, me: Peer, peer: Peer, run_id: str) -> None:
        self._peer, self._name = peer, edge_name(run_id, me.rank, peer.rank)
        self._fd = -1
        self._ring: Ring | None = None
        self._room_to_grow = True
        self._frames: deque[tuple[Label, bytes]] = deque()
        self._unplaced: deque[tuple[Label, bytes, list[Tensor], int]] = deque()
        self._failure: TransportError | None = None

    def connect(self, timeout_s: float) -> None:
        """Connect to the receiver, and hand over the pipe and the buffer.

        Raises:
            TransportError: the receiver doesn't show up, or there is no memory.
        """
        connection = call(self._name, timeout_s)
        if connection is None:
            raise TransportError(who(self._peer), f"no connection within {timeout_s:g} s", "see that device's log")
        with connection:
            try:
                self._ring = Ring(capacity=SMALLEST_RING)
            except OSError:
                why = f"no room for a ring of {SMALLEST_RING} bytes"
                raise TransportError(str(directory()), why, "enlarge it, or use transport: gloo") from None
            reading, self._fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                give(connection, [reading, self._ring.file])
            except OSError:
                raise self._lost() from None
            finally:
                os.close(reading)
        with contextlib.suppress(OSError, AttributeError):  # a pipe of the usual 64 KiB is only slower
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

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
        """Return whether a message waits in this process."""
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
                stuck = self._frames[0][0] if self._frames else self._unplaced[0][0]
                raise TransportError(
                    who(self._peer),
                    f"{stuck} could not be delivered within {timeout_s:g} s",
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
        position = ring.place(nbytes)
        if position is not None:
            return position
        fits, larger = nbytes <= ring.capacity, capacity_for(nbytes, 2 * ring.capacity)
        if self._room_to_grow and (larger <= LARGEST_RING or not fits):
            self._room_to_grow = ring.grow(larger)  # not tried again on every send
            if self._room_to_grow:
                return ring.place(nbytes)
        if not fits:
            raise TransportError(
                str(directory()),
                f"no room for a ring that holds the {nbytes} bytes of {label}",
                "enlarge it (Docker: --shm-size), or use transport: gloo",
            )
        return None

    def _emit(self, label: Label, kind: int, number: int, body: bytes) -> None:
        self._push(label, FRAME.pack(FRAME.size - LENGTH_BYTES + len(body), kind, number) + body)

    def _push(self, label: Label, frame: bytes) -> None:
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


_READ_BYTES = 1 << 16


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
        """Wait until the sender has connected and handed over its buffer. Raises TransportError if it doesn't."""
        connection = answer(self._socket, timeout_s)
        self._socket.close()
        if connection is None:
            raise self._unconnected(timeout_s)
        with connection:
            try:
                self._fd, file = take(connection, 2, timeout_s)
            except TimeoutError:
                raise self._unconnected(timeout_s) from None
            except OSError:
                self._inbox.fail(gone(self._peer, "waiting for it"))
        self._poll.register(self._fd, select.POLLIN)
        try:
            self._ring = Ring(file)
        except OSError as error:
            why = f"cannot map its shared memory: {error}"
            self._inbox.fail(TransportError(who(self._peer), why, "use transport: gloo"))
        finally:
            os.close(file)

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
        self._ring.release(address - start)
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


# Shared memory as a transport: which edges it serves, and how a device opens its ends of them.


class SharedMemory(Transport):
    """CPU tensors between two devices of one host."""

    def refusal(self, src: Peer, dst: Peer) -> str:
        """See Transport.refusal."""
        if src.device != "cpu" or dst.device != "cpu":
            return "shared memory carries CPU tensors, and a GPU is involved"
        return "the two devices are on different nodes" if src.node != dst.node else ""

    def open(self, edges: Sequence[Edge], opening: Opening, ends: Ends) -> None:
        """See Transport.open. Three rounds, each of which only needs the other devices to have done the one before."""
        me, run_id = opening.me, opening.run_id
        readers = {
            peer.rank: ShmReceiver(me, peer, run_id, opening.progress, opening.allocate)
            for peer in opening.sources(edges)
        }
        ends.into.update(readers)
        writers = {peer.rank: ShmSender(me, peer, run_id) for peer in opening.destinations(edges)}
        ends.out.update(writers)
        for writer in writers.values():
            writer.connect(opening.timeout_s)
        for reader in readers.values():
            reader.accept(opening.timeout_s)
