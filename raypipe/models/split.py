"""Cut a list of layers into contiguous stages so that the slowest stage is as fast as possible."""

from __future__ import annotations

from itertools import pairwise

from raypipe.models.layered import LayeredModel
from raypipe.plan.cut.balance import check_stages, contiguous_split


def split_layers(model: LayeredModel, stages: int) -> list[range]:
    """Return the layer numbers of each stage, cut so that the largest sum of ``model.flops`` is minimal.

    A cut assigns whole units of the model to stages. Among the best cuts it is the one with the smallest sum of
    squares, which also balances the other stages.

    Raises:
        SpecError: there are more stages than units.
    """
    units = model.units
    check_stages(stages, len(units))
    cuts = contiguous_split([sum(model.flops[i] for i in unit) for unit in units], stages)
    return [range(units[a].start, units[b - 1].stop) for a, b in pairwise([0, *cuts, len(units)])]
