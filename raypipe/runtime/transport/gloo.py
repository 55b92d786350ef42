"""Channel over torch.distributed's Gloo: CPU tensors between hosts, or on one host without shared memory.

All edges share one process group of the whole world, made for this purpose: Gloo keeps the messages from one rank to
another in order and lets the two directions pass each other, and there is at most one edge per pair and direction.

Three facts about Gloo shape this file. A receive buffer that is too small aborts the process: see ``frames``. A
wait that times out closes the connection, so one can't wait in slices. And a send counts as unfinished until
somebody waits for it: a thread per edge does, asleep outside Python, and gives the buffers back.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from raypipe.errors import TransportError
from raypipe.runtime.transport import frames, wire
from raypipe.runtime.transport.channel import Expected, Label, Peer
from raypipe.runtime.transport.inbox import Inbox, gone, who
from raypipe.runtime.transport.progress import Progress

_FOREVER = timedelta(days=365)
_FRAMES_AHEAD = 8


def open_group(world_size: int) -> dist.ProcessGroup:
    """The group that all Gloo edges of the run share; every rank of the world must call this at the same point."""
    group: dist.ProcessGroup | None = dist.new_group(list(range(world_size)), backend="gloo", timeout=_FOREVER)
    assert group is not None
    return group


class GlooSender:
    """Sending end of the edge from this rank to ``peer``; ``frame_bytes`` must agree with the other end."""

    def __init__(self, peer: Peer, group: dist.ProcessGroup, frame_bytes: int = frames.FRAME_BYTES) -> None:
        self._peer, self._group = peer, group
        self._pool = frames.FramePool(frame_bytes)
        self._flying: queue.SimpleQueue[tuple[Label, Tensor, dist.Work] | None] = queue.SimpleQueue()
        self._landed = threading.Condition()
        self._labels: deque[Label] = deque()
        self._failure: TransportError | None = None
        self._reaper = threading.Thread(target=self._reap, name=f"gloo to rank {peer.rank}", daemon=True)
        self._reaper.start()

    def send(self, label: Label, tensors: Sequence[Tensor]) -> None:
        """See Sender.send. Raises TransportError when the peer is gone."""
        if self._failure is not None:
            raise self._failure
        blocks = [wire.dense(t) for t in tensors]
        head = wire.pack_tensors(label, blocks)
        for frame, used in frames.cut(head, blocks, self._pool):
            try:
                work = dist.isend(frame[:used], self._peer.rank, group=self._group)
            except RuntimeError:
                self._failure = gone(self._peer, f"sending {label}")
                raise self._failure from None
            assert work is not None
            with self._landed:
                self._labels.append(label)
            self._flying.put((label, frame, work))

    @property
    def pending(self) -> bool:
        """Always False: Gloo's own thread keeps sending."""
        return False

    def progress(self) -> None:
        """Nothing to do: see ``pending``."""

    def flush(self, timeout_s: float) -> None:
        """See Sender.flush. A message has left when the peer has received it: Gloo's sends meet receives."""
        deadline = time.monotonic() + timeout_s
        with self._landed:
            while self._labels and self._failure is None:
                if not self._landed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() > deadline:
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

    def _reap(self) -> None:
        while (item := self._flying.get()) is not None:
            label, frame, work = item
            try:
                work.wait()
            except RuntimeError:
                with self._landed:
                    self._failure = self._failure or gone(self._peer, f"sending {label}")
                    self._landed.notify_all()
                return
            self._pool.put(frame)
            with self._landed:
                self._labels.popleft()
                if not self._labels:
                    self._landed.notify_all()


class GlooReceiver:
    """Receiving end of the edge from ``peer`` to this rank; receives for the next frames are always posted."""

    def __init__(
        self,
        peer: Peer,
        group: dist.ProcessGroup,
        progress: Progress | None = None,
        frame_bytes: int = frames.FRAME_BYTES,
    ) -> None:
        self._peer, self._group = peer, group
        self._inbox = Inbox(peer)
        self._progress = progress or Progress()
        self._pool = frames.FramePool(frame_bytes)
        self._counts: deque[int] = deque()  # frames of each message that must still come
        self._unposted = 0
        self._works: deque[tuple[Tensor, dist.Work]] = deque()
        self._closed = False

    def post(self, expected: Sequence[Expected]) -> None:
        """See Receiver.post."""
        self._inbox.post(expected)
        for message in expected:
            n = frames.count(message, self._pool.frame_bytes)
            self._counts.append(n)
            self._unposted += n
        self._post_frames()

    def recv(self, label: Label, timeout_s: float) -> list[Tensor]:
        """See Receiver.recv. After a timeout the connection is gone: the channel can't be used any more."""
        deadline = time.monotonic() + timeout_s
        while True:
            tensors = self._inbox.take(label)
            if tensors is not None:
                return tensors
            frame = self._next_frame(label, deadline, timeout_s)
            message = frames.Assembly(self._inbox, frame)
            self._pool.put(frame)
            for _ in range(self._counts.popleft() - 1):
                frame = self._next_frame(label, deadline, timeout_s)
                message.add(frame)
                self._pool.put(frame)
            self._inbox.keep(message.label, message.tensors)

    def close(self) -> None:
        """See Receiver.close. Posted receives stay until the process group goes."""
        self._closed = True

    def _post_frames(self) -> None:
        while self._unposted and len(self._works) < _FRAMES_AHEAD:
            frame = self._pool.get()
            try:
                work = dist.irecv(frame, self._peer.rank, group=self._group)
            except RuntimeError:
                self._inbox.fail(gone(self._peer, "posting a receive"))
            assert work is not None
            self._works.append((frame, work))
            self._unposted -= 1

    def _next_frame(self, label: Label, deadline: float, timeout_s: float) -> Tensor:
        if self._closed:
            self._inbox.fail(TransportError(who(self._peer), "the channel is closed", "open it again"))
        frame, work = self._works.popleft()
        try:
            self._wait(work, deadline)
        except RuntimeError:
            if time.monotonic() >= deadline:
                self._inbox.fail(self._inbox.late(label, timeout_s))
            self._inbox.fail(gone(self._peer, f"waiting for {label}"))
        self._post_frames()
        return frame

    def _wait(self, work: dist.Work, deadline: float) -> None:
        # Gloo takes whole milliseconds and reads 0 as "for ever".
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        if not self._progress.push():
            work.wait(left)
            return
        # Something of ours is stuck, and only this thread may push it: another one waits.
        failure: list[RuntimeError] = []

        def wait() -> None:
            try:
                work.wait(left)
            except RuntimeError as error:
                failure.append(error)

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        while waiter.is_alive():
            waiter.join(0.001 if self._progress.push() else None)
        if failure:
            raise failure[0]
