"""The least memory of a plan that divides its state, from the memory of the same order undivided.

Gathers and reduce-scatters come into an order without changing the order of its tasks, so at the moment when the
undivided plan is fullest, as many activations are alive. One order so serves every ZeRO level, size of the shard groups
and way of gathering, of which most are too large where memory is short; none of these has to be made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from raypipe.cost.memory import DeviceMemory


def least_divided(
    whole: Sequence[DeviceMemory],
    placement: Sequence[Sequence[int]] | NDArray[np.int64],
    level: int,
    stage: Mapping[str, NDArray[np.float64]],
) -> tuple[DeviceMemory, ...]:
    """Return, per device, terms of memory that are no larger than those at some moment of the divided plan.

    Args:
        whole: of the same order without shards, whose updates wait for the norm, as they do with them.
        placement: device of each stage, per replica.
        level: ZeRO level, 1 to 3.
        stage: bytes by stage of one holder's share: fields of ``StageMemory``.
    """
    state = stage["weights"] + stage["frozen"] + stage["optimizer"]
    held = np.zeros(len(whole))
    np.add.at(held, np.array(placement), np.broadcast_to(state, np.shape(placement)))
    return tuple(_least(one, float(own), level) for one, own in zip(whole, held, strict=True))


def _least(whole: DeviceMemory, state: float, level: int) -> DeviceMemory:
    """``state`` is the device's share of weights and optimizer state, of all replicas."""
    running = whole.activations > 0  # else it may be fullest in its update, which is divided
    return replace(
        DeviceMemory(),
        base=whole.base,
        weights=state,
        inputs=whole.inputs,
        activations=whole.activations,
        casts=whole.casts if running and level < 3 else 0.0,  # at level 3 they go with the gathered weights
        # From level 2 on only a reduce-scatter's sums may be there.
        gradients=whole.gradients if running and level == 1 else 0.0,
        workspace=whole.workspace if running else 0.0,
        messages=whole.messages if running else 0.0,
    )
