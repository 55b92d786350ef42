"""How long a profile measures: thorough for a file that is kept, quick for a job that is about to start."""

from __future__ import annotations

from dataclasses import dataclass

from raypipe.cost.collectives import Kind


@dataclass(frozen=True, slots=True)
class Effort:
    """How often what is measured."""

    warm_up: int
    """Steps that are left out: optimizer state and gradients are allocated, the allocator finds its size."""
    least: int
    """Steps that are timed, of each order of tasks, however long they take."""
    most: int
    """The same at most, where steps are short."""
    budget_s: float
    """For each order of a pass, beyond ``least`` steps."""
    passes: int
    """Times that all sizes are gone through, every second time backwards: a machine's speed wanders within seconds, and
    sizes are compared with each other."""
    pairs: int
    """Comparisons of a device that has its host to itself with all devices at work."""
    every_memory: bool
    """Look at memory at every micro-batch size; else at the smallest and the middle one, which a line goes through."""
    again: int
    """Times that disturbed measurements are made again at most."""
    patience_s: float
    """None is made again once so much time has passed."""
    brief: bool
    """Say once what is measured."""
    message_bytes: tuple[int, ...]
    collective_bytes: tuple[int, ...]
    repeats: int
    collectives: tuple[Kind, ...]


THOROUGH = Effort(
    warm_up=2, least=3, most=40, budget_s=1.0, passes=2, pairs=7,
    every_memory=True, again=2, patience_s=120.0, brief=False,
    message_bytes=(1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 23),
    collective_bytes=(1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 25), repeats=25,
    collectives=("all_reduce", "all_gather", "reduce_scatter"),
)  # fmt: skip
QUICK = Effort(
    warm_up=1, least=2, most=10, budget_s=0.15, passes=1, pairs=3,
    every_memory=False, again=1, patience_s=10.0, brief=True,
    message_bytes=(1 << 12, 1 << 17, 1 << 21), collective_bytes=(1 << 17, 1 << 22), repeats=20,
    collectives=("all_reduce",),
)  # fmt: skip
