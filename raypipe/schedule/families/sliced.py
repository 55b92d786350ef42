"""The ids of a step's slices in the order in which they run forward and backward."""

from __future__ import annotations

from raypipe.schedule.shape import Shape


def forward_ids(shape: Shape) -> list[int]:
    """Return all ids: micro-batch by micro-batch, each from its first slice to its last."""
    return list(range(shape.microbatches * shape.slices))


def returning_ids(shape: Shape) -> list[int]:
    """Return all ids, micro-batch by micro-batch, each from its last slice to its first.

    >>> returning_ids(Shape(devices=1, microbatches=2, slices=3))
    [2, 1, 0, 5, 4, 3]
    """
    k = shape.slices
    return [m * k + i for m in range(shape.microbatches) for i in reversed(range(k))]
