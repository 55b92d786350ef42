"""Figures of a long step from short ones: between warm-up and drain a schedule only repeats itself.

Every figure of a step (its time, a device's peak memory) becomes an affine function of the number of micro-batches
once the step is long enough: task graphs are linear systems over (max, +), whose trajectories are eventually
periodic (Baccelli et al. 1992, Synchronization and Linearity, chapter 3). So three short steps that lie on a line give
the long one without running it. Whether the slope is the final one is checked against the work of the busiest device:
no steady state is faster than that.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from raypipe.plan.candidate import Candidate

DIRECT = 30_000
"""Tasks of a step up to which it is measured whole."""
LONGEST = 120_000
"""Tasks of a step above which it is measured by shorter ones in any case: half a second."""
Figures = NDArray[np.float64]
"""Figures of one step; the first is its time."""
TURNS = (2, 4)
"""Turns of the shortest of the three steps: first try, last try of a step that may be measured whole."""


def at_scale(
    measure: Callable[[int], Figures],
    count: int,
    turn: int,
    most: int | None = None,
    known: Callable[[Figures], bool] = lambda figures: False,
    growth: float = 0.0,
    warm: int | None = None,
) -> Figures:
    """``measure(count)``, from shorter steps where they lie on a line, else itself.

    A step of more than ``most`` micro-batches is never measured: where three shorter ones do not lie on a line, the
    mean growth between two that are as long as may be is taken for all turns that are left. What an order does in turn
    repeats in the long run, after however many turns, so that this misses by a share of one repetition in very many.

    Args:
        measure: figures of a step of so many micro-batches.
        count: micro-batches of the step.
        turn: micro-batches after which the order repeats (or a multiple).
        most: micro-batches up to which a step may be measured; None: any. Five turns may be measured all the same.
        known: whether a shorter step's figures settle what is asked of a step of more than ``most``, as one that is too
            large does; the growth from the first to the second is then near enough.
        growth: of the first figure per micro-batch in the long run, at least; a line that is flatter does not last.
        warm: micro-batches of the shortest step before the order repeats, a multiple of ``turn``; None: two turns.
    """
    rest, room = count % turn, count if most is None else most
    for turns in TURNS:
        first = rest + turns * (turn if warm is None else warm // TURNS[0])
        if count <= first + 3 * turn:
            return measure(count)
        if turns > TURNS[0] and first + 2 * turn > room < count:
            break
        a, b = (measure(first + k * turn) for k in range(2))
        if count > room and known(b):
            return b + (count - first - turn) / turn * (b - a)
        c = measure(first + 2 * turn)
        slope = c - b
        scale = 1e-9 * np.maximum(np.abs(c), 1e-300)
        if np.all(np.abs(slope - (b - a)) <= scale) and slope[0] >= growth * turn * (1 - 1e-9):
            return c + (count - first - 2 * turn) / turn * slope
    if count <= room:
        return measure(count)
    turns = max(room // turn // 2, TURNS[0] + 1)
    a, c = measure(rest + turns // 2 * turn), measure(rest + turns * turn)
    return c + (count - rest - turns * turn) / turn * (c - a) / (turns - turns // 2)


def of_candidate(
    c: Candidate,
    measure: Callable[[int, int | None], Figures],
    whole: int | None = None,
    known: Callable[[Figures], bool] = lambda figures: False,
    growth: float = 0.0,
    repeats: int | None = None,
) -> Figures:
    """Figures of a candidate's step, ``measure(micro-batches, unit)``: itself if it has at most ``whole`` tasks.

    ``whole`` is ``DIRECT`` by default; ``known`` and ``growth`` as for ``at_scale``. ``repeats``: micro-batches after
    which what is measured of an order without units repeats once all its devices are busy; None: twice as many as
    devices.
    """
    count, unit, each = c.microbatches, c.unit, 3 * c.form.stages
    if each * count <= (DIRECT if whole is None else whole):
        return measure(count, unit)
    most, turn = LONGEST // each, 2 * c.stages
    if unit is None and repeats is not None and repeats < turn:
        warm = -(-turn // repeats) * repeats
        return at_scale(lambda n: measure(n, None), count, repeats, most, known, growth, warm)
    if unit is None or unit == count:
        return at_scale(lambda n: measure(n, None if unit is None else n), count, turn, most, known, growth)
    if count <= most or 5 * unit <= most or count % unit:
        return at_scale(lambda n: measure(n, unit), count, unit, most, known, growth)

    def shorter(size: int) -> Figures:  # as many units, of so many micro-batches each
        return at_scale(lambda n: measure(n, size), count // unit * size, size, most, known, growth)

    return at_scale(shorter, unit, turn, max(1, most // min(count // unit, 5)), known, growth)
