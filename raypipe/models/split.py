"""Cut a list of layers into contiguous stages so that the slowest is as fast as can be."""

from __future__ import annotations

from itertools import accumulate, pairwise

from raypipe.errors import SpecError
from raypipe.models.layers import LayerPlan


def split_layers(plan: LayerPlan, stages: int) -> list[range]:
    """Layer numbers of each stage: the smallest possible largest sum of ``plan.flops``, exactly.

    Blocks are what is dealt out: the embedding goes with the first block, the head with the last. Among the best
    cuts, the one with the smallest sum of squares, which evens out the stages that are not the slowest.
    Raises SpecError for more stages than blocks.
    """
    blocks = plan.count - 2
    if not 1 <= stages <= blocks:
        raise SpecError("parallel.stages", f"{stages} stages for a model of {blocks} layers", f"use 1 to {blocks}")
    costs = list(plan.flops[1:-1])
    costs[0] += plan.flops[0]
    costs[-1] += plan.flops[-1]
    cuts = contiguous_split(costs, stages)
    edges = [0, *(cut + 1 for cut in cuts), plan.count]
    return [range(a, b) for a, b in pairwise(edges)]


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
