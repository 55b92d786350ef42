"""Exchange each device's share of a step before its update, so that the step can be finished without that device.

A device tells the others when the gradients of its step are complete and final, and makes no update that it could not
take back before it has heard the same of all others (``Ledger``). So when one device has such an update of a step, the
others have at least that step's gradients and can finish it by themselves; and when none has, all of them can forget
the step and run it again. Which of the two it is follows from what the living devices know (``agreed_steps``).

Source: two-phase commit (Gray 1978, Notes on Data Base Operating Systems, section 5.8.3): the step is the transaction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from raypipe.errors import RunError
from raypipe.runtime.update.collectives import Push, wait_for


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


FIELDS = 3


class Ledger:
    """Sends a device's share of a step's result to all others when its gradients are final, and hears of theirs.

    An update that cannot be taken back waits for that (``wait``). One that was made before its norm is known can be
    taken back and does not wait.

    Args:
        world: the process group of all devices.
        keys: the stage replicas of this device, each of which is updated once a step.
        done: number of steps done so far.
        kept: number of steps whose facts are kept: those of which the driver may have lost the results.
    """

    def __init__(self, world: dist.ProcessGroup, keys: Collection[Hashable], done: int, kept: int) -> None:
        self._world: dist.ProcessGroup | None = world
        self._keys = frozenset(keys)
        self._done = done
        self._told: int | None = None
        """The newest step that was told, from 0."""
        self._work: dist.Work | None = None
        self._found = torch.empty(0, dtype=torch.float64)
        self._heard: deque[Facts] = deque(maxlen=kept)
        self.loss_sum, self.samples = 0.0, 0
        """This device's share of the newest step's loss, and the samples in it."""
        self.begun = done
        """Number of steps begun."""
        self.updated: set[Hashable] = set()
        """The stage replicas whose update of the newest step that was told has been made."""

    def tell(self, step: int, norm_squared: Tensor) -> None:
        """Tell the others that this device's gradients of ``step`` are complete, and its share of the result."""
        assert self._world is not None
        ranks = self._world.size()
        own = torch.tensor([float(norm_squared), self.loss_sum, float(self.samples)], dtype=torch.float64).repeat(ranks)
        self._done, self._told, self.updated = step, step, set()
        self._found = torch.empty_like(own)
        self._work = dist.all_to_all_single(self._found, own, group=self._world, async_op=True)

    def heard(self) -> bool:
        """Return whether ``wait`` would return at once."""
        return self._work is None or self._work.is_completed()

    def wait(self, push: Push) -> None:
        """Wait until all others have told the same of their step.

        Raises:
            TransportError: a device did not do so in time.
        """
        if self._work is not None:
            wait_for("all devices' gradients", self._work, push)
            self._hear()

    def _hear(self) -> None:
        assert self._told is not None
        norms, losses, samples = self._found.view(-1, FIELDS).t().tolist()
        self._heard.append(Facts(self._told, tuple(norms), tuple(losses), tuple(int(n) for n in samples)))
        self._work = None

    def leave(self) -> None:
        """Let go of the process group; take in what has arrived."""
        work, self._world = self._work, None
        if work is not None and work.is_completed():
            try:
                work.wait()
                self._hear()
            except RuntimeError:
                pass
        self._work = None

    def standing(self, pending: bool) -> Standing:
        """Say how far this device is; ``pending``: its updates can still be taken back."""
        if self._told is None:
            return Standing(self._done, ready=False, agreed=False, begun=self.begun)
        if self.updated == self._keys and not pending:
            return Standing(self._told + 1, False, False, tuple(self._heard), self.begun)
        agreed = bool(self._heard) and self._heard[-1].step == self._told
        return Standing(self._told, True, agreed, tuple(self._heard), self.begun)
