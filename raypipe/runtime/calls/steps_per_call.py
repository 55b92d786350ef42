"""How many steps go into one call of the workers.

A call costs about a millisecond in which a device computes nothing, and as much of a processor's time again in the
driver, which shares the host's cores with CPU devices. So short steps are asked for together: as many as take
``CALL_S``. Their results, and what follows from them (a log line, another plan, a stop), come that much later. Nothing
else may lie between two steps of a call: the driver ends a call before a validation, a save or a copy.
"""

from __future__ import annotations

from collections import deque

from raypipe.runtime.executor.step import MOST_STEPS

CALL_S = 0.1
"""Longest call of several steps."""
MEASURED = 3
"""Newest steps of which the longest counts, so that one that seems short does not make a call long."""


class StepsPerCall:
    """Follows the time that steps take."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque(maxlen=MEASURED)

    def took(self, step_s: float) -> None:
        """Note how long a step took, in seconds."""
        self._newest.append(step_s)

    def forget(self) -> None:
        """Begin again, because steps may take another time from now on."""
        self._newest.clear()

    @property
    def most(self) -> int:
        """Steps that the next call may hold.

        >>> calls = StepsPerCall()
        >>> for step_s in (0.024, 0.015, 0.02):
        ...     calls.took(step_s)
        >>> calls.most
        4
        """
        if len(self._newest) < MEASURED:
            return 1
        return max(1, min(MOST_STEPS, int(CALL_S / max(self._newest))))
