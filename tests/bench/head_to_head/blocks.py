"""Blocks: what one contender measured in its turn of a round, and how blocks are told to a rival's processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from raypipe.job.spec import JobSpec
from raypipe.plan.plan import Plan
from raypipe.runtime.executor.step import MOST_STEPS


@dataclass(frozen=True, slots=True)
class Order:
    """What a rival's process is asked to run: ``steps`` steps from the job's start weights."""

    kind: str
    """``pipeline``, ``ddp``, ``fsdp2`` or ``plain``."""
    job: JobSpec
    plan: Plan
    data: Path
    steps: int
    whole: bool = False
    """Forward the process's whole share of the mini-batch at once, instead of accumulating micro-batches."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one process measured."""

    begin: float
    ends: list[float]
    """End of each step on this host's monotonic clock, which all its processes share."""
    cpu: list[float]
    """Processor time this process had used, all threads, at the end of each step."""
    losses: list[float]
    """Per step, this process's part of the mini-batch loss; the parts add up."""
    same_order: bool = True
    """Its schedule has exactly raypipe's order of tasks."""


@dataclass(frozen=True, slots=True)
class Block:
    """One contender's turn."""

    step_s: list[float]
    """All steps of the block; the first holds warm-up."""
    cpu: list[float]
    """Processor time used by all devices at the end of each step."""
    losses: list[float]

    def steady(self, warm_up: int) -> float:
        """Median step of the block, its first ``warm_up`` steps left out.

        Where there are many, the median over all runs of as many steps as raypipe takes in a call: of single steps,
        the median would leave out what lies between two calls.
        """
        steps = self.step_s[warm_up:]
        size = MOST_STEPS if len(steps) >= 2 * MOST_STEPS else 1
        return median(sum(steps[at : at + size]) / size for at in range(len(steps) - size + 1))

    def work(self, warm_up: int) -> float:
        """Mean processor time of a step over all devices: waiting costs none, a busy machine hardly any."""
        return (self.cpu[-1] - self.cpu[warm_up - 1]) / (len(self.cpu) - warm_up)


def joined(reports: Sequence[RankReport]) -> Block:
    """A block from all its ranks: a step lasts from the end of the step before, on the slowest rank, to its own."""
    ends = [max(at) for at in zip(*(r.ends for r in reports), strict=True)]
    starts = [min(r.begin for r in reports), *ends[:-1]]
    losses = [sum(parts) for parts in zip(*(r.losses for r in reports), strict=True)]
    cpu = [sum(used) for used in zip(*(r.cpu for r in reports), strict=True)]
    return Block([end - start for start, end in zip(starts, ends, strict=True)], cpu, losses)


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest relative difference between two loss curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
