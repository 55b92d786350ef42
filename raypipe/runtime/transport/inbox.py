"""The bookkeeping of every receiver: which messages were announced, which arrived, and what has failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from raypipe.errors import TransportError
from raypipe.runtime.transport import message_header as wire
from raypipe.runtime.transport.channel import Expected, Label, Peer

Allocate = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes the tensor that a message is received into."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor."""
    return torch.empty(shape, dtype=dtype)


def empty_pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor in pinned memory, from which a GPU copies by itself.

    torch keeps freed blocks, so this is cheap after the first steps. It needs CUDA.
    """
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def who(peer: Peer) -> str:
    """Return the name that errors give to a peer.

    >>> who(Peer(1, "n", "cpu", "stage 1"))
    'stage 1 (rank 1)'
    """
    return f"{peer.name} (rank {peer.rank})" if peer.name else f"rank {peer.rank}"


def gone(peer: Peer, doing: str) -> TransportError:
    """Make the error for a peer that died or closed its end while this device was ``doing`` something."""
    return TransportError(
        who(peer), f"connection lost while {doing}: the peer stopped or failed", "see that device's log for the cause"
    )


def absent(error: RuntimeError) -> TransportError:
    """Make the error for torch's own when process groups are made and a device does not come."""
    why = str(error).strip().splitlines() or [type(error).__name__]
    return TransportError("process groups", f"another device did not join: {why[0]}", "see which one failed, and why")


class Inbox:
    """The announced messages of one channel, and those that arrived before they were asked for.

    Every announced message has a header. A channel passes the header that arrived to ``accept``, which compares the two
    and returns what to read.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._ahead: deque[tuple[Expected, bytes]] = deque()
        self._labels: set[Label] = set()
        self._arrived: dict[Label, list[Tensor]] = {}
        self._failure: TransportError | None = None

    def post(self, expected: Sequence[Expected]) -> None:
        """Append announced messages. Raises TransportError if a label is announced while it is still outstanding."""
        for message in expected:
            if message.label in self._labels:
                raise TransportError(who(self.peer), f"{message.label} was announced twice", "number the steps")
            self._labels.add(message.label)
            self._ahead.append((message, wire.pack(message.label, message.tensors)))

    def take(self, label: Label) -> list[Tensor] | None:
        """Return the message if it has arrived, or None if it was announced and is still to come.

        Raises:
            TransportError: never announced, or the channel failed before.
        """
        tensors = self._arrived.pop(label, None)
        if tensors is not None:
            self._labels.discard(label)
            return tensors
        if self._failure is not None:
            raise self._failure
        if label not in self._labels:
            raise TransportError(who(self.peer), f"{label} was never announced", "post() the step's messages first")
        return None

    @property
    def upcoming(self) -> Expected | None:
        """The message that must come next."""
        return self._ahead[0][0] if self._ahead else None

    def accept(self, head: bytes) -> Expected:
        """Check a header against that of the next announced message, and move on to the one after it.

        Raises:
            TransportError: another message came than the one announced.
        """
        if self._ahead and head == self._ahead[0][1]:
            return self._ahead.popleft()[0]
        came = wire.describe(wire.unpack(head))
        wanted = wire.describe(self._ahead[0][0]) if self._ahead else "no message"
        self._failure = TransportError(
            who(self.peer), f"expected {wanted} but {came} came", "both ends must run the same plan and order"
        )
        raise self._failure

    def keep(self, label: Label, tensors: list[Tensor]) -> None:
        """Store a message that arrived until ``take`` asks for it."""
        self._arrived[label] = tensors

    def late(self, label: Label, timeout_s: float) -> TransportError:
        """Make the error for a message that did not arrive in time."""
        first = self.upcoming
        behind = f"; first in line is {first.label}" if first is not None and first.label != label else ""
        return TransportError(
            who(self.peer),
            f"{label} did not come within {timeout_s:g} s{behind}",
            "look at that device: it may be stuck, or its tasks may take longer than the message timeout",
        )

    def fail(self, error: TransportError) -> NoReturn:
        """Remember the failure, so that later calls repeat the first cause, and raise it."""
        self._failure = self._failure or error
        raise error
