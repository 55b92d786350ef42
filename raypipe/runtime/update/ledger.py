"""Exchange each device's share of a step before its update, so that the step can be finished without that device.

A device tells the others when the gradients of its step are complete and final, and makes no update that it could not
take back before it has heard the same of all others (``Ledger``). So when one device has such an update of a step, the
others have at least that step's gradients and can finish it by themselves; and when none has, all of them can forget
the step and run it again. Which of the two it is follows from what the living devices know (``agreed_steps``).

Source: two-phase commit (Gray 1978, Notes on Data Base Operating Systems, section 5.8.3): the step is the transaction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from raypipe.errors import RunError, TransportError
from raypipe.runtime.update.collectives import Push
from raypipe.runtime.update.norm import Shares


@dataclass(frozen=True, slots=True)
class Facts:
    """The shares of a step that all devices sent, by rank: what the driver needs of the result of one that died."""

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
                "recovery",
                f"a device has done {one.done} steps and another one {target}",
                "restart from the last checkpoint",
            )
    return target


class Ledger(Shares):
    """Sends a device's share of a step's result, as that of the norm, when its gradients are final, and keeps all's.

    An update that cannot be taken back waits for that. One that was made before its norm is known can be taken back.

    Args:
        world: the process group of all devices.
        done: number of steps done so far.
        kept: number of steps whose facts are kept: those of which the driver may have lost the results.
    """

    what = "all devices' gradients"

    def __init__(self, world: dist.ProcessGroup, done: int, kept: int) -> None:
        super().__init__(world)
        self._done = done
        self._told: int | None = None
        """The newest step that was told, from 0."""
        self._noted = 0, 0.0, 0
        self._heard: deque[Facts] = deque(maxlen=kept)

    def note(self, step: int, loss_sum: float, samples: int) -> None:
        """Note this device's share of a step's loss, and the samples in it; ``start`` sends it."""
        self._noted = step, loss_sum, samples

    def start(self, share: float | Tensor) -> None:
        """See Shares.start."""
        self._told, *loss = self._noted
        self._send([float(share), *loss])

    def wait(self, push: Push) -> list[float]:
        """See Shares.wait."""
        new = self._work is not None
        norms = super().wait(push)
        if new and self._told is not None:
            _, losses, samples = self._rows.t().tolist()
            self._heard.append(Facts(self._told, tuple(norms), tuple(losses), tuple(map(int, samples))))
        return norms

    def leave(self) -> None:
        """See Shares.leave. What has arrived is taken in."""
        with suppress(TransportError):
            if self.ready():
                self.wait(lambda: False)
        super().leave()

    def take(self, norms: Sequence[float]) -> None:
        """Take the shares of all devices from one that has heard them, after ``leave``."""
        self._rows = torch.tensor([norms], dtype=torch.float64).t()

    def standing(self, begun: int, final: bool) -> Standing:
        """Say how far this device is.

        Args:
            begun: number of steps begun.
            final: whether the updates of the newest step that was told are made and cannot be taken back.
        """
        step, heard = self._told, tuple(self._heard)
        if step is None:
            return Standing(self._done, ready=False, agreed=False, begun=max(begun, self._done))
        if final:
            return Standing(step + 1, False, False, heard, begun)
        return Standing(step, True, bool(heard) and heard[-1].step == step, heard, begun)
