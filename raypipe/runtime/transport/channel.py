"""The interface of a channel: it carries tensors from one device to another, first in, first out.

A channel carries messages, each a short list of tensors under a ``Label``. The order of messages on a channel is
fixed before the step starts (it is the sender's task order), so the receiver knows what comes next and can
post its receives ahead. No tensor passes through the object store or the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

Direction = Literal["act", "grad"]
Payload = tuple[Tensor, ...]
"""The tensors one stage hands to another for one micro-batch."""


class Label(NamedTuple):
    """Identifies one message: an activation that goes down the pipeline, or a gradient that comes back."""

    direction: Direction
    src_stage: int
    dst_stage: int
    mb: int
    step: int
    attempt: int = 0
    """1 where the step was begun again, because the update before it was undone: what attempt 0 sent is stale."""

    def __str__(self) -> str:
        what = "activation" if self.direction == "act" else "gradient"
        at = f"step {self.step}" + (", begun again" if self.attempt else "")
        return f"{what} of micro-batch {self.mb}, stage {self.src_stage} -> {self.dst_stage}, {at}"


class TensorSpec(NamedTuple):
    """Shape and dtype of one sent tensor. They are known before the step, so that no handshake is needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        size = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True)
class StageIOSpec:
    """The tensors that one stage sends per micro-batch, and which of them a gradient comes back for."""

    act: tuple[TensorSpec, ...]
    differentiable: tuple[bool, ...]

    @cached_property
    def grad(self) -> tuple[TensorSpec, ...]:
        """The gradients' shapes and dtypes: those of the activations they belong to."""
        return tuple(spec for spec, back in zip(self.act, self.differentiable, strict=True) if back)


class Expected(NamedTuple):
    """A message that will arrive: its label and the tensors it carries."""

    label: Label
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a device's actor lives, which decides which transport can serve an edge."""

    rank: int
    """Global rank: position among all devices of the run."""
    node: str
    """Ray node id; two peers with the same one share memory."""
    device: str
    """``cpu`` or ``cuda:UUID``; two stages may share one GPU."""
    name: str = ""
    """How errors call it, e.g. ``stage 2 · replica 0``."""
    lacks: tuple[str, ...] = ()
    """Transports that its process can't use at all, e.g. ``nccl`` where torch was built without it."""


class Sender(Protocol):
    """The sending end of one channel."""

    def send(self, label: Label, tensors: Sequence[Tensor]) -> None:
        """Snapshot the tensors and return without waiting for the peer. The caller may overwrite them at once."""

    @property
    def pending(self) -> bool:
        """Return whether a message waits for ``progress`` to send it."""

    def progress(self) -> None:
        """Send as much of what is pending as is possible without waiting."""

    def flush(self, timeout_s: float) -> None:
        """Wait until every message has left. Raises TransportError, which names the peer and the first that has not."""

    def close(self) -> None:
        """Release what the channel holds; idempotent, also after a failure."""


class Receiver(Protocol):
    """The receiving end of one channel."""

    def post(self, expected: Sequence[Expected]) -> None:
        """Announce the next messages, in the order in which they will come after those announced before."""

    def recv(self, label: Label, timeout_s: float) -> list[Tensor]:
        """Wait for one posted message. Messages ahead of it are kept for later calls.

        Raises:
            TransportError: nothing came within ``timeout_s``, or something else than what was posted; names the
                label, the peer and the micro-batch.
        """

    def close(self) -> None:
        """Release what the channel holds; idempotent, also after a failure."""


@runtime_checkable
class Prepares(Protocol):
    """A sender that can do most of a ``send`` in advance, while the device is idle."""

    def prepare(self, label: Label, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Return a function that sends what the tensors hold when it is called. Shapes and storage must not change."""


@runtime_checkable
class CountsUnreceived(Sender, Protocol):
    """A sender that can be far ahead of its device, and holds a copy of each message until it has been received."""

    @property
    def unreceived(self) -> int:
        """Messages that have not been received yet."""


@runtime_checkable
class TakesIn(Protocol):
    """A receiver that can take in messages before ``recv`` asks for them."""

    def take_in(self) -> None:
        """Take in what has arrived of the posted messages, without waiting. ``recv`` raises what is wrong with it."""


@runtime_checkable
class IssuesReceives(Protocol):
    """A receiver that may issue a receive to its GPU before ``recv`` asks for the message."""

    def issue(self, label: Label, timeout_s: float) -> None:
        """Issue the receive of a posted message, and those before it. Compute waits for it only after ``recv``.

        Raises:
            TransportError: as ``Receiver.recv``.
        """


PUSH_EVERY_S = 0.0002
"""How often a waiting receiver looks after its own device's stuck messages, while there are any."""


class Progress:
    """All senders of a device; receivers call ``push`` while they wait.

    Two devices that both wait for a message, each with a pending one that the other needs, would wait for ever.
    """

    def __init__(self) -> None:
        self._senders: list[Sender] = []

    def add(self, sender: Sender) -> None:
        """Include a sender."""
        self._senders.append(sender)

    def push(self) -> bool:
        """Send what all senders have pending. Returns True if something still is: the caller should not sleep long.

        Raises:
            TransportError: a sender found its peer gone.
        """
        busy = False
        for sender in self._senders:
            if sender.pending:
                sender.progress()
                busy = busy or sender.pending
        return busy
