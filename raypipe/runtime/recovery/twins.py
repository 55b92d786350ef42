"""Which living device can give a replacement the state of each stage that it has to hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from raypipe.runtime.setup.tensor_ranks import rank_of


class Transfer(NamedTuple):
    """The state of a stage replica goes from one process to another."""

    source: tuple[int, int]
    """(stage, replica) as the sender has it."""
    target: tuple[int, int]
    """(stage, replica) as the receiver has it."""
    sender: int
    """Rank of the process that has the state."""
    receiver: int
    """Rank of the replacement."""


def transfers(placement: Sequence[Sequence[int]], dead: Collection[int], tensor: int = 1) -> list[Transfer] | None:
    """Return the transfers that restore the processes ``dead``, in one order for all; None if a stage is lost.

    Args:
        placement: device of each stage, per replica.
        dead: ranks.
        tensor: number of processes of a device; each has a twin of its own tensor rank only.

    >>> transfers([[0, 1], [2, 3]], {1})
    [Transfer(source=(1, 1), target=(1, 0), sender=3, receiver=1)]
    >>> transfers([[0, 1]], {1}) is None
    True
    """
    found = []
    for rank in sorted(dead):
        device, tensor_rank = divmod(rank, tensor)
        for replica, devices in enumerate(placement):
            for stage, held in enumerate(devices):
                if held != device:
                    continue
                twins = ((rank_of(other[stage], tensor_rank, tensor), r) for r, other in enumerate(placement))
                living = [(twin, r) for twin, r in twins if twin not in dead]
                if not living:
                    return None
                sender, r = living[0]
                found.append(Transfer((stage, r), (stage, replica), sender, rank))
    return found
