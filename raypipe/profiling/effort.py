"""The effort of a profile: thorough for a profile file, quick for a job that is about to start."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from raypipe.cost.collectives import Kind


@dataclass(frozen=True, slots=True)
class Effort:
    """How often everything is measured."""

    warm_up: int
    """Steps before timing, in which gradients, optimizer state and the allocator's pools are allocated."""
    least: int
    """Smallest number of timed steps per order of tasks, however long they take."""
    most: int
    """Largest number of timed steps per order of tasks."""
    budget_s: float
    """Seconds per order of tasks, after which no step beyond ``least`` begins."""
    passes: int
    """Number of passes over all sizes, every second one backwards. A machine's speed varies within seconds, and sizes
    are compared with each other."""
    pairs: int
    """Number of comparisons of one working device with all devices working."""
    every_memory: bool
    """Whether to measure memory at every micro-batch size; otherwise at the smallest and the middle one, through which
    a line is fitted."""
    again: int
    """How often disturbed measurements are repeated at most."""
    patience_s: float
    """Seconds after which no measurement is repeated."""
    brief: bool
    """Whether to report progress only once."""
    message_bytes: tuple[int, ...]
    collective_bytes: tuple[int, ...]
    repeats: int
    collectives: tuple[Kind, ...]
    whole_s: float = math.inf
    """Seconds for all micro-batch sizes, or ``STEPS`` steps of the job where these take longer. Sizes that do not fit
    into them are not measured."""
    once: bool = False
    """Whether every order of tasks is measured in a single step, its memory too: see ``one_step``."""


STEPS = 1.5
"""Steps of the job that a profile may take; with what comes before and after it, less than two."""


def one_step(effort: Effort) -> Effort:
    """Return the effort for layers whose tasks take so long that neither a clock's nor an allocator's noise matters.

    The first micro-batch, which allocates the gradients, warms up for those that follow it.
    """
    return replace(effort, warm_up=0, least=1, most=1, pairs=1, again=0, once=True)


THOROUGH = Effort(
    warm_up=2,
    least=3,
    most=40,
    budget_s=1.0,
    passes=2,
    pairs=7,
    every_memory=True,
    again=2,
    patience_s=120.0,
    brief=False,
    message_bytes=(1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 23),
    collective_bytes=(1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 25),
    repeats=25,
    collectives=("all_reduce", "all_gather", "reduce_scatter"),
)
QUICK = Effort(
    warm_up=1,
    least=2,
    most=10,
    budget_s=0.15,
    passes=1,
    pairs=3,
    every_memory=False,
    again=1,
    patience_s=10.0,
    brief=True,
    message_bytes=(1 << 12, 1 << 17, 1 << 21),
    collective_bytes=(1 << 17, 1 << 22),
    repeats=20,
    collectives=("all_reduce",),
    whole_s=20.0,
)
