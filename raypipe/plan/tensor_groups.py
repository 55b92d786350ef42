"""Groups of devices that share layers as a dimension of the search: one judge for every size of them.

A group counts as one device in a profile of its own (``cost/tensor.py``), so each size has a predictor of its own, and
all grids wait in one queue by the least time that they can take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from raypipe.plan.candidate import Candidate
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.schedule.shape import Grid

Sharing = tuple[int, bool]
"""(devices that share each layer, whether micro-batches run in halves beside one another's sums)."""
ALONE: Sharing = (1, False)


@dataclass(frozen=True, slots=True)
class Judges:
    """A ``Judge`` that asks the predictor of a grid's, or a candidate's, own groups."""

    by: Mapping[Sharing, Predictor]

    def of(self, what: Grid) -> Predictor:
        """The predictor whose devices are groups of that size."""
        return self.by[what.tensor, what.sub_pipelined]

    def on(self, grid: Grid) -> Iterator[Candidate]:
        """See ``Judge``."""
        return self.of(grid).on(grid)

    def least_on(self, grid: Grid) -> float:
        """See ``Judge``."""
        return self.of(grid).least_on(grid)

    def least(self, candidate: Candidate) -> float:
        """See ``Judge``."""
        return self.of(candidate).least(candidate)

    def outright(self, candidate: Candidate) -> list[tuple[float, Candidate]] | None:
        """See ``Judge``."""
        return self.of(candidate).outright(candidate)

    def predict(self, candidate: Candidate, timed: bool = False) -> Prediction:
        """See ``Predictor``."""
        return self.of(candidate).predict(candidate, timed)

    def time(self, prediction: Prediction, final: bool = False) -> Prediction:
        """See ``Predictor``."""
        return self.of(prediction.candidate).time(prediction, final)

    def oom_fallback(self, prediction: Prediction) -> list[tuple[float, Candidate]]:
        """See ``Judge``."""
        return self.of(prediction.candidate).oom_fallback(prediction)

    def holds(self, candidate: Candidate) -> bool:
        """See ``Predictor``."""
        return self.of(candidate).holds(candidate)
