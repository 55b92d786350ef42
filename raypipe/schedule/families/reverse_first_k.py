"""Pure data parallelism out of order: one device whose stages are layers, with the first layers' dW at the end."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.errors import ScheduleError
from raypipe.schedule.families.out_of_order import RULES
from raypipe.schedule.ir import Schedule, StageGraph, Task


def reverse_first_k(layers: int, k: int) -> Schedule:
    """Return a step of one data-parallel copy that postpones dW of the first ``k`` layers and runs it in order 1 to k.

    The backward goes from the last layer to the first; dW of later layers runs where it falls due. Then come dW of
    layers 1, 2, ... k: the next forward needs the sum of layer 1 first, and it starts before the dW of the others. Each
    sum (AR) is issued at once. ``k`` = 0 or 1 is the usual backward.

    Raises:
        ScheduleError: there are no layers, or fewer than ``k``.

    Source: Oh et al. 2022 (OOO backprop), section 5.1, Algorithm 2.
    """
    if layers < 1 or not 0 <= k <= layers:
        raise ScheduleError("first_k", f"{k} of {layers} layers", f"use 0 to {max(layers, 1)}")
    order = [Task("F", layer, (0,)) for layer in range(layers)]
    for layer in reversed(range(layers)):
        if layer >= k:
            order += [Task("W", layer, (0,)), Task("AR", layer, ())]
        if layer:
            order.append(Task("B", layer, (0,)))
    for layer in range(k):
        order += [Task("W", layer, (0,)), Task("AR", layer, ())]
    return Schedule(
        name="reverse-first-k", placement=((0,) * layers,), orders=(tuple(order),), microbatches=1,
        graph=StageGraph.chain(layers), rules=RULES,
    )  # fmt: skip


def postponed_peaks(held: Sequence[float], waiting: Sequence[float]) -> list[float]:
    """Return, for each k from 0 to the number of layers, the bytes that a device holds at its fullest in the backward.

    While layer i has its gradient, the usual backward holds ``held[i]``. With k layers postponed, what the weight
    gradients of layers i + 1 to k - 1 wait for is there as well; so more layers never take less.

    Args:
        held: per layer, all that is allocated when its gradient is complete, without postponing.
        waiting: per layer, inputs of products and gradients of their outputs (``LayerProfile.waiting``), for the
            samples of a micro-batch.

    >>> postponed_peaks([4.0, 5.0, 6.0], [3.0, 3.0, 3.0])
    [6.0, 6.0, 7.0, 10.0]

    Source: Oh et al. 2022 (OOO backprop), Algorithm 2: M().
    """
    beside = [0.0] * len(held)
    """Per layer, what waits at its moment."""
    found = [max(held, default=0.0)]
    for k in range(1, len(held) + 1):
        for layer in range(k - 1):
            beside[layer] += waiting[k - 1]
        found.append(max(own + more for own, more in zip(held, beside, strict=True)))
    return found


def most_postponed(held: Sequence[float], waiting: Sequence[float], memory: float) -> int:
    """Return the largest k with which a device keeps within ``memory``; 0 if not even the usual backward does.

    ``held`` and ``waiting`` are as for ``postponed_peaks``.
    """
    return max((k for k, peak in enumerate(postponed_peaks(held, waiting)) if peak <= memory), default=0)
