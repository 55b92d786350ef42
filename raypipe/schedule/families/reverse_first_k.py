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


def temporary_memory(kept: Sequence[float], gradients: Sequence[float], k: int) -> float:
    """Return the most that activations and output gradients take during the backward, M() of Algorithm 2.

    Args:
        kept: per layer, what its backward needs of its forward; freed after its dW (and dO).
        gradients: per layer, the gradient of its output; there from the dO of the next layer to its own dO and dW.
        k: layers whose dW is postponed.
    """
    held = sum(kept) + gradients[-1]
    most = held
    for layer in reversed(range(len(kept))):
        held += gradients[layer - 1] if layer else 0.0
        most = max(most, held)
        held -= kept[layer] + gradients[layer] if layer >= k else 0.0
    return most


def most_postponed(kept: Sequence[float], gradients: Sequence[float], memory: float) -> int:
    """Return the largest k whose temporary memory is within ``memory``; 0 if not even the usual backward is.

    Postponing more never takes less, so the first k that does not fit ends the search.
    """
    fits = 0
    for k in range(1, len(kept) + 1):
        if temporary_memory(kept, gradients, k) > memory:
            break
        fits = k
    return fits
