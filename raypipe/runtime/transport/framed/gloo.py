"""Channel over torch.distributed's Gloo: CPU tensors between hosts, or on one host without shared memory.

All edges that are connected, such as those of one pipeline, share one process group, made for this purpose: Gloo keeps
the messages from one rank to another in order and lets the two directions pass each other, and there is at most one
edge per pair and direction. Gloo connects every pair of a group, so a group of the whole world would take longer and
longer to make with more copies of the pipeline.

Three facts about Gloo shape this file. A receive buffer that is too small aborts the process: see ``frame_channel``. A
wait that times out closes the connection, so one can't wait in slices. And a send counts as unfinished until
somebody waits for it: the edge's thread does, asleep outside Python, and gives the buffers back.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from raypipe.errors import TransportError
from raypipe.runtime.transport.channel import PUSH_EVERY_S, Peer, Progress
from raypipe.runtime.transport.framed.frame_channel import FrameReceiver, FrameSender
from raypipe.runtime.transport.inbox import Allocate, empty, gone, who
from raypipe.runtime.transport.process_groups import FOREVER, connected, new_group
from raypipe.runtime.transport.transport import Edge, Ends, Opening, Transport

_FRAMES_AHEAD = 4


class Gloo(Transport):
    """CPU tensors between any two devices."""

    def refusal(self, src: Peer, dst: Peer) -> str:
        """See Transport.refusal."""
        return "" if src.device == dst.device == "cpu" else "Gloo carries CPU tensors, and a GPU is involved"

    def groups(self, edges: Sequence[Edge]) -> list[tuple[int, ...]]:
        """See Transport.groups."""
        return connected(edges)

    def open(self, edges: Sequence[Edge], opening: Opening, ends: Ends) -> None:
        """See Transport.open."""
        group = open_group(self.groups(edges), opening.timeout_s)
        if group is None:
            return
        for peer in opening.destinations(edges):
            ends.out[peer.rank] = gloo_sender(peer, group)
        for peer in opening.sources(edges):
            ends.into[peer.rank] = GlooReceiver(peer, group, opening.progress, opening.allocate)


def open_group(groups: Sequence[Sequence[int]], timeout_s: float) -> dist.ProcessGroup | None:
    """Make the groups for Gloo edges, which share no rank; return this rank's. Every rank of the world calls this.

    The other ranks have ``timeout_s`` to come; messages on the group may take any time (``FOREVER``).
    """
    made = [new_group(ranks, "gloo", timedelta(seconds=timeout_s)) for ranks in groups]
    own = next((group for group in made if group is not None), None)
    if own is not None:
        dist.distributed_c10d._set_pg_timeout(FOREVER, own)  # torch has no public call for it
    return own


def gloo_sender(peer: Peer, group: dist.ProcessGroup) -> FrameSender[dist.Work | None]:
    """Make the sending end of the edge from this rank to ``peer``.

    A send may wait for its receive as long as it takes: the default is the timeout that the group was made with, and a
    send that fails closes the connection under a receive that is still within its own.
    """
    return FrameSender(
        peer,
        lambda frame: dist.isend(frame, peer.rank, group=group),
        lambda work: work and work.wait(FOREVER),
    )


class GlooReceiver(FrameReceiver):
    """Receiving end of the edge from ``peer`` to this rank; receives for the next frames are always posted."""

    def __init__(
        self,
        peer: Peer,
        group: dist.ProcessGroup,
        progress: Progress | None = None,
        allocate: Allocate = empty,
    ) -> None:
        super().__init__(peer, progress, allocate)
        self._group = group
        self._unposted = 0
        self._works: deque[tuple[Tensor, dist.Work]] = deque()
        self._closed = False

    def close(self) -> None:
        """See Receiver.close. Receives that are posted stay so until the process group goes."""
        self._closed = True

    def _announce(self, count: int) -> None:
        self._unposted += count
        while self._unposted and len(self._works) < _FRAMES_AHEAD:
            frame = self._pool.get()
            try:
                work = dist.irecv(frame, self._peer.rank, group=self._group)
            except RuntimeError:
                self._inbox.fail(gone(self._peer, "posting a receive"))
            assert work is not None
            self._works.append((frame, work))
            self._unposted -= 1

    def _next_frame(self, deadline: float) -> Tensor:
        if self._closed:
            self._inbox.fail(TransportError(who(self._peer), "the channel is closed", "open it again"))
        frame, work = self._works.popleft()
        try:
            self._wait(work, deadline)
        except RuntimeError:
            raise (TimeoutError if time.monotonic() >= deadline else ConnectionError) from None
        self._announce(0)
        return frame

    def _wait(self, work: dist.Work, deadline: float) -> None:
        # Gloo cuts to whole milliseconds, and 0 means for ever. Rounded up, because a wait that ended before the
        # deadline would look like a lost connection.
        left = timedelta(milliseconds=max(1, math.ceil(1000 * (deadline - time.monotonic()))))
        if not self._progress.push():
            work.wait(left)
            return
        # Something of ours is stuck, and only this thread may push it: another one waits.
        failures: list[RuntimeError] = []

        def wait() -> None:
            try:
                work.wait(left)
            except RuntimeError as error:
                failures.append(error)

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        while waiter.is_alive():
            waiter.join(PUSH_EVERY_S if self._progress.push() else None)
        if failures:
            raise failures[0]
