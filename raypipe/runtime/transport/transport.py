"""The interface of a transport, a way of carrying messages between two devices. ``registry`` lists them by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from raypipe.runtime.transport.channel import Peer, Progress, Receiver, Sender
from raypipe.runtime.transport.inbox import Allocate, empty, empty_pinned

Edge = tuple[int, int]
"""A directed pair of ranks: messages go from the first to the second."""


class Ends(NamedTuple):
    """The channels of one device: outgoing ones by destination rank, incoming ones by source rank."""

    out: dict[int, Sender]
    into: dict[int, Receiver]

    def close(self) -> None:
        """Close all of them."""
        for sender in self.out.values():
            sender.close()
        for receiver in self.into.values():
            receiver.close()


@dataclass(frozen=True)
class Opening:
    """The arguments for opening the channels of a device. All but ``me`` and ``progress`` are the same everywhere."""

    me: Peer
    peers: Mapping[int, Peer]
    """All devices of the run by rank."""
    run_id: str
    """Names the run's files on this host and its groups."""
    timeout_s: float = 300.0
    """How long to wait for another device: ``train.message_timeout_s``."""
    progress: Progress = field(default_factory=Progress)
    """What receivers push while they wait."""

    def destinations(self, edges: Sequence[Edge]) -> list[Peer]:
        """The devices to which this one sends on these edges."""
        return [self.peers[dst] for src, dst in edges if src == self.me.rank]

    def sources(self, edges: Sequence[Edge]) -> list[Peer]:
        """The devices from which this one receives on these edges."""
        return [self.peers[src] for src, dst in edges if dst == self.me.rank]

    @property
    def allocate(self) -> Allocate:
        """The function that allocates received CPU tensors: pinned ones where a GPU copies from them."""
        return empty if self.me.device == "cpu" else empty_pinned


class Transport(ABC):
    """One way of carrying messages: which edges it can serve, and how a device opens its ends of them."""

    needs: ClassVar[str] = ""
    """What a device must have for it, as an error says it; see ``available``."""
    over_world_group: ClassVar[bool] = False
    """Whether messages travel over the world's own process group, whose timeout then counts from when a receive is
    posted, long before anybody waits for it."""

    def available(self) -> bool:
        """Return whether this process has what the transport ``needs``."""
        return True

    @abstractmethod
    def refusal(self, src: Peer, dst: Peer) -> str:
        """Why it can't carry messages from ``src`` to ``dst``; empty if it can. All devices get the same answer."""

    def over_cpu_channel(self, src: Peer, dst: Peer) -> bool:
        """Return whether its channel for this edge sends over one for CPU tensors, which ``open`` finds in ``ends``."""
        return False

    def groups(self, edges: Sequence[Edge]) -> list[tuple[int, ...]]:
        """The ranks of each process group that ``open`` makes for these edges."""
        return []

    @abstractmethod
    def open(self, edges: Sequence[Edge], opening: Opening, ends: Ends) -> None:
        """Put this device's ends of ``edges`` into ``ends``, ready for use.

        Every device calls this with the same edges in the same order, also where none of them is its own: making a
        process group takes all devices. What was put in ``ends`` before a failure is closed by the caller.

        Raises:
            TransportError: another device does not open its end in time.
        """
