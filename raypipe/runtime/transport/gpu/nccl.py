"""Channel for CUDA tensors between different GPUs: payload over NCCL, an envelope with the header over a CPU channel.

NCCL hangs or corrupts when sizes differ, and its failures and delays are invisible to the host. So each message's
header goes over the CPU channel as soon as the send is queued on the GPU; the receiver waits for that on the host, with
a timeout that names the message, checks it, and only then queues the matching receive. Hence NCCL never waits for
something that is not already queued on the other GPU, and no receive kernel blocks an allocation or a module load for
long. The host runs ahead of the GPUs, so transfers still start as soon as their data is ready.

A transfer may still wait on the GPU, for compute before it; and CUDA promises no progress between streams. So programs
for GPUs name the places where receives are issued early (``schedule.lowering.safe_order``), and no two devices issue
their transfers in orders that could wait for each other, whatever the hardware queues do. That alone would do without
envelopes. They stay for what an order cannot do: sizes are checked before NCCL sees them, a lost peer
is an error on the host with a name and a timeout, and a receive occupies multiprocessors only when its send is queued.

CUDA IPC between two GPUs of one host would need no envelope order at all: the receiver maps the sender's buffer once,
and copies from it (``cudaMemcpyPeerAsync``) after an interprocess event, on a copy engine instead of multiprocessors; a
copy starts when its data is there and never waits for a peer's kernel. It would be one more ``Transport``, preferred
where it measures faster than NCCL; it has not been written, for want of two GPUs to measure on.

``Link`` is the part that differs between torch's NCCL and ``ray.util.collective``'s.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from raypipe.errors import TransportError
from raypipe.runtime.transport import message_header as wire
from raypipe.runtime.transport.channel import Expected, Label, Peer, Receiver, Sender, TensorSpec
from raypipe.runtime.transport.gpu.side_stream import CopyStream, Mark, Side, current_gpu, snapshot
from raypipe.runtime.transport.inbox import Inbox, who
from raypipe.runtime.transport.process_groups import in_rounds, new_group
from raypipe.runtime.transport.transport import Edge, Ends, Opening, Transport

EDGE_CTAS = 4
"""Most multiprocessors that a transfer between two stages occupies. A receive is queued when its send is, which may be
long before the data is ready, and spins meanwhile. Chosen without a GPU: not measured."""


class Nccl(Transport):
    """CUDA tensors between two different GPUs."""

    needs = "a build of torch with NCCL"

    def available(self) -> bool:
        """See Transport.available."""
        return dist.is_nccl_available()

    def refusal(self, src: Peer, dst: Peer) -> str:
        """See Transport.refusal."""
        if "cpu" in (src.device, dst.device):
            return "NCCL needs a GPU at both ends"
        return "NCCL can't connect two stages on one GPU" if src.device == dst.device else ""

    def over_cpu_channel(self, src: Peer, dst: Peer) -> bool:
        """See Transport.over_cpu_channel."""
        return True

    def groups(self, edges: Sequence[Edge]) -> list[tuple[int, ...]]:
        """See Transport.groups."""
        return list(edges)

    def open(self, edges: Sequence[Edge], opening: Opening, ends: Ends) -> None:
        """See Transport.open."""
        for index in chain(*in_rounds(edges)):  # making a communicator, and warming it up, takes both ends
            edge = edges[index]
            group = new_group(edge, "nccl", timedelta(seconds=opening.timeout_s), ctas=EDGE_CTAS)
            if group is not None:
                peer = sum(edge) - opening.me.rank
                side = CopyStream(current_gpu(), edge_stream(edge, opening))
                put_on_top(edge, TorchLink(peer, group), side, opening, ends)


class Link(Protocol):
    """A connection of two GPUs. Both calls queue on the current stream and return. Tensors must not be empty."""

    def send(self, tensor: Tensor) -> None:
        """Queue sending a dense tensor."""

    def recv(self, tensor: Tensor) -> None:
        """Queue receiving into a dense tensor."""

    def close(self) -> None:
        """Release the communicator."""


class TorchLink:
    """A communicator of its own for one directed edge; made, with its first message, by both ends at the same point."""

    def __init__(self, peer_rank: int, group: dist.ProcessGroup) -> None:
        self._peer, self._group = peer_rank, group

    def send(self, tensor: Tensor) -> None:
        """See Link.send."""
        work = dist.isend(tensor, self._peer, group=self._group)
        assert work is not None
        work.wait()  # the current stream waits for NCCL's own; the host doesn't

    def recv(self, tensor: Tensor) -> None:
        """See Link.recv."""
        work = dist.irecv(tensor, self._peer, group=self._group)
        assert work is not None
        work.wait()

    def close(self) -> None:
        """See Link.close; torch releases it with the process group."""


def edge_stream(edge: Edge, opening: Opening) -> str:
    """Return the name of this device's stream for an edge."""
    src, dst = edge
    return f"to {dst}" if opening.me.rank == src else f"from {src}"


def warm_up(link: Link, sends: bool, device: torch.device) -> None:
    """Pass one number, so that the communicator exists before training. Making it may block both ends."""
    tensor = torch.zeros(1, device=device)
    link.send(tensor) if sends else link.recv(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def put_on_top(edge: Edge, link: Link, side: Side, opening: Opening, ends: Ends) -> None:
    """Replace this device's end of the edge, a CPU channel, by one that sends or receives over ``link``."""
    src, dst = edge
    sends = opening.me.rank == src
    warm_up(link, sends, side.device)
    if sends:
        ends.out[dst] = NcclSender(opening.peers[dst], link, ends.out[dst], side)
    else:
        ends.into[src] = NcclReceiver(opening.peers[src], link, ends.into[src], side)


class NcclSender:
    """Sends over ``link``. ``base`` carries the envelopes; this channel owns it.

    The host may issue a send long before the GPU comes to it, and a copy of the message exists from then on; so the
    runner waits, before it sends, until few enough are unreceived (``Program.unreceived``).
    """

    def __init__(self, peer: Peer, link: Link, base: Sender, side: Side) -> None:
        self._peer, self._link, self._base, self._side = peer, link, base, side
        self._flying: deque[tuple[Label, list[Tensor], Mark]] = deque()

    def send(self, label: Label, tensors: Sequence[Tensor]) -> None:
        """See Sender.send."""
        head = wire.pack_tensors(label, tensors)
        blocks = snapshot(tensors)
        with self._side.after_compute():
            for block in blocks:
                if block.numel():
                    self._link.send(block)
        # The buffers stay ours until NCCL has read them.
        self._flying.append((label, blocks, self._side.mark()))
        self._base.send(label, [torch.frombuffer(bytearray(head), dtype=torch.uint8)])
        self._reap()

    @property
    def unreceived(self) -> int:
        """See CountsUnreceived.unreceived."""
        self._reap()
        return len(self._flying)

    @property
    def pending(self) -> bool:
        """Return whether an envelope is pending; the GPU sends the payload by itself."""
        return self._base.pending

    def progress(self) -> None:
        """See Sender.progress."""
        self._reap()
        if self._base.pending:
            self._base.progress()

    def flush(self, timeout_s: float) -> None:
        """See Sender.flush. A message has left when the other GPU has it."""
        deadline = time.monotonic() + timeout_s
        self._base.flush(timeout_s)
        self._reap()
        while self._flying:
            if time.monotonic() > deadline:
                raise TransportError(
                    who(self._peer),
                    f"{self._flying[0][0]} was not received within {timeout_s:g} s",
                    "look at that device: it has stopped receiving",
                )
            time.sleep(0.0001)
            self._reap()

    def close(self) -> None:
        """See Sender.close. Buffers that NCCL may still read are left to torch, and so is the link they are on."""
        self._reap()
        self._side.borrow(block for _, blocks, _ in self._flying for block in blocks)
        if not self._flying:
            self._link.close()
        self._flying.clear()
        self._base.close()

    def _reap(self) -> None:
        while self._flying and self._flying[0][2].query():
            self._flying.popleft()


class NcclReceiver:
    """Receives over ``link``. ``base`` carries the envelopes; this channel owns it."""

    def __init__(self, peer: Peer, link: Link, base: Receiver, side: Side) -> None:
        self._link, self._base, self._side = link, base, side
        self._inbox = Inbox(peer)
        self._marks: dict[Label, Mark] = {}
        self._last: Mark | None = None

    def post(self, expected: Sequence[Expected]) -> None:
        """See Receiver.post."""
        self._inbox.post(expected)
        heads = [len(wire.pack(*message)) for message in expected]
        envelopes = [TensorSpec((head,), torch.uint8) for head in heads]
        self._base.post([Expected(m.label, (envelope,)) for m, envelope in zip(expected, envelopes, strict=True)])

    def recv(self, label: Label, timeout_s: float) -> list[Tensor]:
        """See Receiver.recv. The host waits for the envelope only; the compute stream waits for the payload."""
        tensors = self._inbox.take(label)
        if tensors is None:
            self.issue(label, timeout_s)
            tensors = self._inbox.take(label)
            assert tensors is not None
        self._side.hand_over(self._marks.pop(label), tensors)
        return tensors

    def issue(self, label: Label, timeout_s: float) -> None:
        """See IssuesReceives.issue. The host waits for the envelope."""
        if label in self._marks:
            return
        envelope = self._base.recv(label, timeout_s)[0]
        # It came after those of all earlier messages, and NCCL delivers in order: theirs are queued first.
        while (ahead := self._inbox.upcoming) is not None and ahead.label != label:
            self._queue(self._base.recv(ahead.label, timeout_s)[0])
        self._queue(envelope)

    def close(self) -> None:
        """See Receiver.close. A link that still waits for its peer is left to torch: closing it could wait for ever."""
        self._base.close()
        if self._last is None or self._last.query():
            self._link.close()

    def _queue(self, envelope: Tensor) -> None:
        message = self._inbox.accept(envelope.numpy().tobytes())
        with self._side.independent():
            tensors = [torch.empty(s.shape, dtype=s.dtype, device=self._side.device) for s in message.tensors]
            for tensor in tensors:
                if tensor.numel():
                    self._link.recv(tensor)
        self._last = self._marks[message.label] = self._side.mark()
        self._inbox.keep(message.label, tensors)
