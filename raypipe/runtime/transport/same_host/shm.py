"""Shared memory as a transport: which edges it serves, and how a device opens its ends of them."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.runtime.transport.channel import Peer
from raypipe.runtime.transport.same_host.receive import ShmReceiver
from raypipe.runtime.transport.same_host.send import ShmSender
from raypipe.runtime.transport.transport import Edge, Ends, Opening, Transport


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
        writers = {peer.rank: ShmSender(me, peer, run_id, opening.ring_bytes) for peer in opening.destinations(edges)}
        ends.out.update(writers)
        for writer in writers.values():
            writer.connect(opening.timeout_s)
        for reader in readers.values():
            reader.accept(opening.timeout_s)
