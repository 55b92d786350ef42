"""How far each device was when another one died, and the step after which all of them can go on.

A device tells the others when the gradients of its step are complete and final, and makes no update that it could not
take back before it has heard the same of all others (``ledger``). So when one device has such an update of a step, the
others have at least that step's gradients and can finish it by themselves; and when none has, all of them can forget
the step and run it again. Which of the two it is follows from what the living devices know.

Source: two-phase commit (Gray 1978, Notes on Data Base Operating Systems, section 5.8.3), with the step as transaction.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from raypipe.errors import RunError


@dataclass(frozen=True, slots=True)
class Facts:
    """What every device has told of a step, by rank: all that the driver needs of the result of one that died."""

    step: int
    """Counted from 0."""
    norm_squared: tuple[float, ...]
    loss_sum: tuple[float, ...]
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Standing:
    """How far one device is."""

    done: int
    """Number of steps whose updates are final here."""
    ready: bool
    """Whether the gradients of the step after these are complete, and the others have been told so."""
    agreed: bool
    """Whether all devices are known to be ``ready`` for that step, so that its update may be final on some of them."""
    facts: tuple[Facts, ...] = ()
    """Of the newest steps of which all have been heard."""
    begun: int = 0
    """Number of steps that this device has begun."""


def agreed_steps(standings: Collection[Standing]) -> int:
    """Return the number of steps after which all devices go on.

    Raises:
        RunError: a device can come to that state neither forward nor backward, which no death can bring about.
    """
    target = max(one.done + one.agreed for one in standings)
    for one in standings:
        if one.done != target and not (one.done == target - 1 and one.ready):
            raise RunError(
                "recovery", f"a device has done {one.done} steps and another one {target}",
                "restart from the last checkpoint",
            )  # fmt: skip
    return target
