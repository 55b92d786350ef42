"""Cut a list of layers into contiguous stages so that the slowest is as fast as can be."""

from __future__ import annotations

from itertools import pairwise

from raypipe.models.layered import LayeredModel
from raypipe.plan.cut.balance import check_stages, contiguous_split


def split_layers(model: LayeredModel, stages: int) -> list[range]:
    """Layer numbers of each stage: the smallest possible largest sum of ``model.flops``, exactly.

    What is dealt out are the model's units. Among the best cuts, the one with the smallest sum of squares, which evens
    out the stages that are not the slowest. Raises SpecError for more stages than units.
    """
    units = model.units
    check_stages(stages, len(units))
    cuts = contiguous_split([sum(model.flops[i] for i in unit) for unit in units], stages)
    return [range(units[a].start, units[b - 1].stop) for a, b in pairwise([0, *cuts, len(units)])]
