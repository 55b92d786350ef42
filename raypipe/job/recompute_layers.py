"""The layers that a job recomputes instead of keeping their activations."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from math import floor

from raypipe.errors import ScheduleError, SpecError, nearest
from raypipe.job.parallel_spec import ParallelSpec

Cut = Sequence[Sequence[int]]


def layers_to_recompute(parallel: ParallelSpec, cut: Cut) -> frozenset[int] | None:
    """Return the layers that R recomputes; None if ``recompute`` does not select layers, so R recomputes whole stages.

    With ``stage-aware``, a stage keeps the activations of its first layers and recomputes the later ones, so that only
    one layer's output has to be kept between the two parts.
    """
    if isinstance(parallel.recompute, tuple):
        return frozenset(i for i in parallel.recompute if isinstance(i, int))
    if parallel.recompute != "stage-aware":
        return None
    return recomputed_after(cut, kept_shares(parallel, len(cut)))


def kept_shares(parallel: ParallelSpec, stages: int) -> tuple[float, ...]:
    """Return, for ``stage-aware``, the share of each stage's layers that keep their activations.

    Without ``alphas`` the first stage's share is 0, the start of the search for it.
    """
    given = parallel.alphas
    return given if isinstance(given, tuple) else alphas(stages, given or 0.0)


def recomputed_after(cut: Cut, shares: Sequence[float]) -> frozenset[int]:
    """Return the layers to recompute: each stage keeps its first ``share`` of layers, rounded down."""
    return frozenset(
        i for layers, share in zip(cut, shares, strict=True) for i in layers[floor(share * len(layers) + 1e-9) :]
    )


def named_layers(wanted: Sequence[int | str], names: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of the layers given by number, name or pattern.

    Raises:
        SpecError: a number, name or pattern matches no layer.
    """
    found: set[int] = set()
    for one in wanted:
        if isinstance(one, int):
            if not 0 <= one < len(names):
                why = f"there is no layer {one}: the model has {len(names)}"
                raise SpecError("parallel.recompute", why, f"use 0 to {len(names) - 1}")
            found.add(one)
            continue
        hits = [i for i, name in enumerate(names) if fnmatchcase(name, one)]
        if not hits:
            raise SpecError("parallel.recompute", f'no layer is called "{one}"', nearest(one, names))
        found.update(hits)
    return tuple(sorted(found))


def alphas(stages: int, first: float) -> tuple[float, ...]:
    """Merak's stage-aware recomputation: the share of each stage's layers that keeps its activations, under 1F1B.

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
