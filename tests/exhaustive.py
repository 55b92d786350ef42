"""Cases beyond those of every day: ``make test`` leaves them out, ``make test-all`` takes them too.

A matrix whose every row and column shows something keeps one case of each; so every feature has a run every day.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

ONLY = pytest.mark.exhaustive


def exhaustive(*cases: Any) -> list[Any]:
    """These values of a parameter, marked; a tuple is one value of several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=ONLY) for case in cases]


def crossed(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """All pairs of two parameters, the rows' first; all are marked but a diagonal that has every row and column.

    >>> [case.values for case in crossed("abc", "xy") if not case.marks]
    [('a', 'x'), ('b', 'y'), ('c', 'x')]
    """
    daily = {(n % len(rows), n % len(columns)) for n in range(max(len(rows), len(columns)))}
    return [
        pytest.param(row, column, marks=() if (i, j) in daily else ONLY)
        for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns))
    ]
