"""A number of a step that is infinite or not a number."""

from __future__ import annotations


class NonFiniteError(Exception):
    """The driver has found one; ``step`` counts from 1."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(step, what)
        self.step, self.what = step, what
