"""What a step needs beyond its program, what a device reports of it, and what the reports come to together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from raypipe.errors import SampleCountError
from raypipe.plan.online.controller import StepMemory
from raypipe.runtime.cast_messages import MessageCast
from raypipe.schedule.lowering.norm_policy import RequestedNormPolicy


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a device reports of one step; small, since it travels through Ray."""

    loss_sum: float
    """Sum of the losses of the micro-batches whose last stage is here, over the targets of the mini-batch; of a tensor
    group's members, the first one's only."""
    samples: int
    """Samples in ``loss_sum``."""
    norm_squared: float
    """This device's share of the squared global gradient norm, before clipping."""
    times: NDArray[np.float64]
    """``[tasks, 2]`` start and end of every task, in seconds: on this host's monotonic clock, and, as an actor
    returns it, on the run's (``shared_clock``)."""
    received: int
    """Messages that came from other devices."""
    received_bytes: int
    """Of the tensors in them."""
    all_reduces: float
    """Gradient all-reduces; each of a group's members counts its share of one."""
    tensor_all_reduces: int
    """All-reduces within layers, over this device's members."""
    memory: StepMemory
    """What was measured of it, where it was."""
    optimistic: bool
    """The update was made before the global norm was known; undone and made again if that turned out too large."""


def check_samples(where: str, results: Sequence[StepResult], due: int) -> None:
    """Every sample is in the loss once: a part of a mini-batch would train all the same, and worse.

    Raises:
        SampleCountError: there are more or fewer than ``due``.
    """
    counted = sum(r.samples for r in results)
    if counted != due:
        raise SampleCountError(
            where, f"its loss is of {counted} samples instead of {due}",
            "this is a fault of raypipe: report it with the run's plan.json",
        )  # fmt: skip


def communication_counts(results: Sequence[StepResult], tensor: int) -> dict[str, int]:
    """Messages, their bytes and all-reduces of a step, over all workers; ``tensor`` of them are one device."""
    counts = {
        "p2p": sum(r.received for r in results),
        "p2p_bytes": sum(r.received_bytes for r in results),
        "all_reduce": round(math.fsum(r.all_reduces for r in results)),
    }
    if tensor > 1:
        counts["tensor_all_reduce"] = sum(r.tensor_all_reduces for r in results) // tensor
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What stays the same over all steps of a run."""

    seed: int
    microbatches: int
    """Micro-batch ids of a step, over all replicas."""
    samples_per_microbatch: int
    clip: float | None
    update: RequestedNormPolicy
    timeout_s: float
    autocast: torch.dtype | None
    device: torch.device
    message_cast: MessageCast | None = None
    """What messages between devices go through."""
    sub_pipelined: bool = False
    """Run every micro-batch in two halves that take turns."""
    tensor_rank: int = 0
    """Which of its device's processes this one is; losses, which all of them compute, are the first's to report."""
