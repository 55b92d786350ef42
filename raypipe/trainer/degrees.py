"""``raypipe.init``: the degrees of parallelism of trainers created afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from raypipe.errors import SpecError


@dataclass(frozen=True, slots=True)
class Degrees:
    """Degrees of data, tensor and pipeline parallelism; None if the planner chooses."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None


_degrees = Degrees()


def init(dp: int | None = None, tp: int | None = None, pp: int | None = None) -> None:
    """Set the degrees of data, tensor and pipeline parallelism for trainers created afterwards.

    Without ``pp``, the planner chooses the schedule, stages and micro-batches, and also the replicas unless ``dp`` is
    given. For that, it profiles the model on the available devices for some seconds before training. With ``pp``,
    degrees that are not given are 1. ``tp`` requires ``pp``, because the planner does not choose tensor parallelism.

    Raises:
        SpecError: a degree is below 1, or ``tp`` is given without ``pp``.
    """
    global _degrees
    for name, value in (("dp", dp), ("tp", tp), ("pp", pp)):
        if value is not None and value < 1:
            raise SpecError(f"raypipe.init({name}=)", f"{value} is not a number of devices", "give 1 or more")
    if tp is not None and tp > 1 and pp is None:
        raise SpecError("raypipe.init(tp=)", "tensor parallelism needs pp", "add pp=; 1 for no pipeline")
    _degrees = Degrees(dp, tp, pp)


def degrees() -> Degrees:
    """Return what ``init`` has set."""
    return _degrees


def microbatch(share: int, stages: int) -> int:
    """Return the largest micro-batch size that divides ``share`` into at least two micro-batches per stage, else 1.

    >>> microbatch(32, 4), microbatch(12, 2), microbatch(4, 8)
    (4, 3, 1)
    """
    most = max(1, share // (2 * stages))
    return max(size for size in range(1, most + 1) if share % size == 0)
