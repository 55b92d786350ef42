"""Waits for a collective while the device's own messages move on, and names the collective if it fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from raypipe.errors import TransportError
from raypipe.runtime.transport.channel import PUSH_EVERY_S

Push = Callable[[], bool]
"""Moves this device's own messages on; True while some are left that only another push can move."""


class Pending(Protocol):
    """The methods of ``torch.distributed.Work`` that are used here."""

    def is_completed(self) -> bool:
        """Return whether ``wait`` would return at once."""

    def wait(self) -> Any:
        """Wait; raise RuntimeError if it failed."""


class PendingSum(Pending, Protocol):
    """One that can call back."""

    def get_future(self) -> Any:
        """Return what calls back when it is complete."""


def wait_for(what: str, work: Pending, push: Push) -> None:
    """Wait for a collective. A pending message of this device may be what the last member needs before it can join.

    Raises:
        TransportError: another member did not join in time; Gloo's own error names neither what was waited for nor for
            whom.
    """
    while push() and not work.is_completed():
        time.sleep(PUSH_EVERY_S)
    try:
        work.wait()
    except RuntimeError as error:
        raise TransportError(
            what, f"another holder did not join: {error}", "see which stage failed or hangs; train.message_timeout_s"
        ) from error
