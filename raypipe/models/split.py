"""Cut a list of layers into contiguous stages so that the slowest is as fast as can be."""

from __future__ import annotations

from itertools import accumulate, pairwise

from raypipe.errors import SpecError
from raypipe.models.layered import LayeredModel


def split_layers(model: LayeredModel, stages: int) -> list[range]:
    """Layer numbers of each stage: the smallest possible largest sum of ``model.flops``, exactly.

    What is dealt out are the model's units. Among the best cuts, the one with the smallest sum of squares, which evens
    out the stages that are not the slowest. Raises SpecError for more stages than units.
    """
    units = model.units
    if not 1 <= stages <= len(units):
        raise SpecError(
            "parallel.stages", f"{stages} stages for a model of {len(units)} layers", f"use 1 to {len(units)}"
        )
    cuts = contiguous_split([sum(model.flops[i] for i in unit) for unit in units], stages)
    return [range(units[a].start, units[b - 1].stop) for a, b in pairwise([0, *cuts, len(units)])]


def contiguous_split(costs: list[float], parts: int) -> list[int]:
    """Where parts 1, 2, ... begin, for the smallest largest sum (then the smallest sum of squares) of ``parts`` runs.

    Two dynamic programs in O(parts * n^2): the first finds the bound, the second the most even cut within it.

    >>> contiguous_split([1, 1, 1, 1, 4], 3)
    [2, 4]
    """
    n = len(costs)
    total = [0.0, *accumulate(costs)]
    infinite = float("inf")

    slowest = [0.0] + [infinite] * n  # slowest[j]: best bound for the first j costs in the parts so far
    for _ in range(parts):
        slowest = [infinite] + [
            min(max(slowest[i], total[j] - total[i]) for i in range(j)) for j in range(1, n + 1)
        ]  # a part is never empty
    bound = slowest[n] * (1 + 1e-12)  # sums taken in another order may differ by rounding

    squares = [0.0] + [infinite] * n
    begins: list[list[int]] = []
    for _ in range(parts):
        found, begin = [infinite] * (n + 1), [0] * (n + 1)
        for j in range(1, n + 1):
            for i in range(j):
                run = total[j] - total[i]
                if run <= bound and squares[i] + run * run < found[j]:
                    found[j], begin[j] = squares[i] + run * run, i
        squares = found
        begins.append(begin)

    cuts, end = [], n
    for begin in reversed(begins[1:]):
        end = begin[end]
        cuts.append(end)
    return cuts[::-1]
