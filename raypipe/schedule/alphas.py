"""Merak's stage-aware recomputation: how large a share of each stage's layers keeps its activations."""

from __future__ import annotations

from raypipe.errors import ScheduleError


def alphas(stages: int, first: float) -> tuple[float, ...]:
    """Shares of layers that are not recomputed, per stage of a 1F1B pipeline, from the first stage's.

    Stage i of s (from 1) has s - i micro-batches in flight beside the one that goes back, so keeping a share a_i of
    its layers takes (s - i) a_i activations more than recomputing them all. That is the same on every stage with
    a_i = (s - 1) a_1 / (s - i), and never more than 1. In the shifted critical path the stage before the last has one
    micro-batch more, as many as the one before it, and the last has nothing in flight.

    >>> alphas(4, 0.5)
    (0.5, 0.75, 0.75, 1.0)

    Raises:
        ScheduleError: a share that is none.

    Source: Lai et al. 2022 (Merak), arXiv:2206.04959, section 5.2.
    """
    if not 0 <= first <= 1:
        raise ScheduleError("alphas", f"{first} of the first stage", "use 0 to 1")
    if stages == 1:
        return (1.0,)
    found = [first, *(min(1.0, (stages - 1) * first / (stages - i)) for i in range(2, stages - 1))]
    return (*found[: stages - 1], *found[-1:] * (stages - 1 - len(found)), 1.0)
