"""Channel for CUDA tensors through pinned host memory, over a CPU channel: two stages on one GPU, or no NCCL.

The copies to and from the host run on a stream of their own; the host never waits for one. A message is handed to the
CPU channel when its copy is done, which ``progress`` notices: the executor calls it between tasks, and receivers call
it while they wait. Where an edge joins a GPU and a CPU device, only the GPU's end is one of these.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from raypipe.errors import TransportError
from raypipe.runtime.transport.channel import Expected, Label, Peer, Receiver, Sender
from raypipe.runtime.transport.gpu.side_stream import CopyStream, Mark, Side, current_gpu, snapshot
from raypipe.runtime.transport.inbox import Allocate, empty_pinned, who
from raypipe.runtime.transport.transport import Edge, Ends, Opening, Transport


class Pinned(Transport):
    """Tensors through pinned host memory, where there is a GPU at one end or at both."""

    def refusal(self, src: Peer, dst: Peer) -> str:
        """See Transport.refusal."""
        return "pinned memory serves GPUs, and there is none at either end" if src.device == dst.device == "cpu" else ""

    def over_cpu_channel(self, src: Peer, dst: Peer) -> bool:
        """See Transport.over_cpu_channel."""
        return True

    def open(self, edges: Sequence[Edge], opening: Opening, ends: Ends) -> None:
        """See Transport.open."""
        if opening.me.device == "cpu":
            return
        for peer in opening.destinations(edges):
            ends.out[peer.rank] = PinnedSender(peer, ends.out[peer.rank], CopyStream(current_gpu(), f"to {peer.rank}"))
        for peer in opening.sources(edges):
            ends.into[peer.rank] = PinnedReceiver(ends.into[peer.rank], CopyStream(current_gpu(), f"from {peer.rank}"))


class PinnedSender:
    """Sends CUDA tensors over ``base``, which it owns."""

    def __init__(self, peer: Peer, base: Sender, side: Side, allocate: Allocate = empty_pinned) -> None:
        self._peer, self._base, self._side, self._allocate = peer, base, side, allocate
        self._copying: deque[tuple[Label, list[Tensor], Mark]] = deque()

    def send(self, label: Label, tensors: Sequence[Tensor]) -> None:
        """See Sender.send."""
        blocks = snapshot(tensors)
        with self._side.after_compute():
            hosts = []
            for block in blocks:
                host = self._allocate(block.shape, block.dtype)
                host.copy_(block, non_blocking=True)
                hosts.append(host)
        self._side.borrow(blocks)
        self._copying.append((label, hosts, self._side.mark()))
        self.progress()

    @property
    def pending(self) -> bool:
        """Return whether a copy is under way, or the CPU channel has something pending."""
        return bool(self._copying) or self._base.pending

    def progress(self) -> None:
        """See Sender.progress."""
        while self._copying and self._copying[0][2].query():
            label, hosts, _ = self._copying.popleft()
            self._base.send(label, hosts)
        if self._base.pending:
            self._base.progress()

    def flush(self, timeout_s: float) -> None:
        """See Sender.flush."""
        deadline = time.monotonic() + timeout_s
        self.progress()
        while self._copying:
            if time.monotonic() > deadline:
                raise TransportError(
                    who(self._peer),
                    f"{self._copying[0][0]} did not leave the GPU within {timeout_s:g} s",
                    "the work before it on this GPU takes longer, or is stuck",
                )
            time.sleep(0.0001)
            self.progress()
        self._base.flush(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """See Sender.close."""
        self._copying.clear()
        self._base.close()


class PinnedReceiver:
    """Receives over ``base`` (which it owns, and which should allocate with ``empty_pinned``) into CUDA tensors."""

    def __init__(self, base: Receiver, side: Side) -> None:
        self._base, self._side = base, side

    def post(self, expected: Sequence[Expected]) -> None:
        """See Receiver.post."""
        self._base.post(expected)

    def recv(self, label: Label, timeout_s: float) -> list[Tensor]:
        """See Receiver.recv. The host waits until the message is here; the copy to the GPU is the streams' business."""
        hosts = self._base.recv(label, timeout_s)
        # torch reuses a pinned block only when the copies out of it are done, so dropping `hosts` is safe.
        with self._side.independent():
            tensors = [host.to(self._side.device, non_blocking=True, copy=True) for host in hosts]
        self._side.hand_over(self._side.mark(), tensors)
        return tensors

    def close(self) -> None:
        """See Receiver.close."""
        self._base.close()
