"""Sends a device's pending messages while it waits for those of others.

Two devices that both wait for a message, each with a pending one that the other needs, would wait for ever. So a device
that waits sends its own pending messages meanwhile.
"""

from __future__ import annotations

from raypipe.runtime.transport.channel import Sender

PUSH_EVERY_S = 0.0002
"""How often a waiting receiver looks after its own device's stuck messages, while there are any."""


class Progress:
    """All senders of a device; receivers call ``push`` while they wait."""

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
