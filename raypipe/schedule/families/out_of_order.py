"""Out-of-order backprop on a pipeline: weight gradients can run late, because no other stage waits for them.

In all three schedules, W depends only on the incoming gradient, and stage 0 computes no input gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.families.greedy import Policy, order_greedily, ring, whole_step
from raypipe.schedule.ir import Rules, Schedule, Task
from raypipe.schedule.kinds import BW, Kind
from raypipe.schedule.shape import Shape

RULES = Rules(w_dep="grad", skip_first_b=True)


def blocks(shape: Shape) -> tuple[int, ...]:
    """Return the device of each stage; neighbouring stages share a device."""
    return tuple(s // shape.chunks for s in range(shape.devices * shape.chunks))


def model_parallel(shape: Shape, costs: CostTable) -> Schedule:
    """Run one micro-batch at a time through all devices, with joint backwards and no overlap.

    The makespan is N times the sum of all tasks and messages.

    Source: OOO backprop, section 5 (cross-layer model parallelism), Figure 5 (a).
    """
    placement = blocks(shape)
    rows: list[list[Task]] = [[] for _ in range(shape.devices)]
    for m in range(shape.microbatches):
        for stage, device in enumerate(placement):
            rows[device].append(Task("F", stage, (m,)))
        for stage in reversed(range(len(placement))):
            rows[placement[stage]].append(Task(BW, stage, (m,)))
    return Schedule.of_chain("model-parallel", [placement], rows, shape.microbatches, RULES)


def fast_forward(shape: Shape, costs: CostTable) -> Schedule:
    """Gradient fast-forwarding (OOO-Pipe1): run forwards, then input gradients as early as possible, W in between.

    Neighbouring stages share a device. Eight stages on two devices take 19 for one micro-batch and unit costs.

    Source: OOO backprop, section 5, Figures 5 (b) and 13 (b).
    """
    return _ordered("fast-forward", blocks(shape), shape, costs, ("F", "B", "W"))


def modulo(shape: Shape, costs: CostTable) -> Schedule:
    """Fast-forwarding with modulo allocation (OOO-Pipe2): stage s is on device s mod D, and input gradients run first.

    Each stage sends its gradient to another device and can compute its W at once. Eight stages on two devices take 16
    for one micro-batch and unit costs.

    Source: OOO backprop, section 5, Figures 5 (c) and 13 (c).
    """
    return _ordered("modulo", ring(shape), shape, costs, ("B", "F", "W"))


def _ordered(
    name: str, placement: tuple[int, ...], shape: Shape, costs: CostTable, kinds: tuple[Kind, ...]
) -> Schedule:
    policy = Policy(kinds=kinds, key=lambda t: (t.mbs[0], t.stage if t.kind == "F" else -t.stage))
    result = order_greedily(whole_step(name, placement, shape.microbatches, RULES), costs, policy)
    if result is None:  # cannot be: this policy has no limits
        raise ScheduleError(name, "no order found", "report this")
    return result.schedule


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
    return Schedule.of_chain("reverse-first-k", [[0] * layers], [order], 1, RULES)


class HeldMemory(NamedTuple):
    """Memory of a device in a backward that postpones nothing; bytes, per layer but for ``above``.

    A layer's moment is from when the gradient of its output arrives until that of the layer below does.
    """

    above: float
    """The most that is allocated before the last layer's moment."""
    held: Sequence[float]
    """The most that is allocated at the layer's moment."""
    apart: Sequence[float]
    """The same without what the weight gradients of this layer and of those above wait for, as far as the usual
    backward still has it."""
    waiting: Sequence[float]
    """What the layer's weight gradients wait for where they are postponed: inputs of products and gradients of their
    outputs (``LayerProfile.waiting``), for the samples of a micro-batch."""


def postponed_peaks(memory: HeldMemory) -> list[float]:
    """Return, for each k from 0 to the number of layers, the bytes that a device holds at its fullest in the backward.

    At the moment of a layer i that is not postponed that is ``held[i]``. At the moment of one that is, the operands of
    layers i to k - 1 are there, and beside them ``apart[i]``; so more layers hardly ever take less.

    >>> postponed_peaks(HeldMemory(0.0, [4.0, 5.0, 6.0], [1.0, 2.0, 3.0], [3.0, 3.0, 3.0]))
    [6.0, 6.0, 7.0, 10.0]

    Source: Oh et al. 2022 (OOO backprop), Algorithm 2: M().
    """
    count = len(memory.held)
    beside = [0.0] * count
    """Per layer, what waits at its moment."""
    result = [max([memory.above, *memory.held])]
    for k in range(1, count + 1):
        for layer in range(k):
            beside[layer] += memory.waiting[k - 1]
        first = [apart + more for apart, more in zip(memory.apart[:k], beside, strict=False)]
        result.append(max([memory.above, *first, *memory.held[k:]]))
    return result


def most_postponed(memory: HeldMemory, limit: float) -> int:
    """Return the largest k with which a device keeps within ``limit`` bytes; 0 if not even the usual backward does."""
    return max((k for k, peak in enumerate(postponed_peaks(memory)) if peak <= limit), default=0)
