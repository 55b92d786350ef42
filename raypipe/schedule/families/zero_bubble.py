"""Zero bubble: the backward is split, so that weight gradients fill bubbles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.families.greedy import Ordered, Policy, Unordered, order_greedily, ordered, whole_step
from raypipe.schedule.families.one_f_one_b import one_f_one_b
from raypipe.schedule.families.repeat_steady_state import repeat_steady_state
from raypipe.schedule.ir import Rules, Schedule
from raypipe.schedule.kinds import Kind
from raypipe.schedule.passes.backward import split_backward
from raypipe.schedule.shape import Shape
from raypipe.schedule.walk import walk

Score = Callable[[Ordered], tuple[float, float]]


def h1(shape: Shape, costs: CostTable) -> Schedule:
    """ZB-H1: the smallest makespan found with at most as many activations as 1F1B's first device.

    With uniform costs, N >= 2D and W <= F + B, the makespan is N(F+B+W) + (D-1)(F+B-W), plus 4(D-1)c with latency c; no
    order within that memory is shorter. The paper's order reaches it only for F = B = W. With k slices, it has the
    memory of 1F1B with slices: D + k - 1 of them.

    Source: Qi et al. 2024 (zero bubble), arXiv:2401.10241, sections 2.1 and 3.1 (the heuristic's idea). Slices: Sun et
    al. 2024 (Seq1F1B), arXiv:2406.03488.
    """
    depth, slices = shape.devices, shape.slices
    cap = _cap(shape, depth + slices - 1)
    times = set(zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True))
    f, b, w = times.pop()
    uniform = not times

    def optimal(found: Ordered) -> bool:
        if slices > 1:  # the formula is that of slices of even cost
            return False
        goal = found.schedule.microbatches * (f + b + w) + (depth - 1) * (max(f, f + b - w) + 4 * min(costs.links))
        return uniform and found.makespan <= goal * (1 + 1e-12)

    policies = _policies(cap, lambda s: max(1, cap - s), (("F", "B", "W"), ("B", "F", "W")), leads_first=True)
    return _search("zb-h1", shape, costs, policies, lambda o: (o.makespan, o.span), optimal)


def h2(shape: Shape, costs: CostTable) -> Schedule:
    """ZB-H2: the smallest span found with 2D - 1 activations; it has no bubble between a device's first and last task.

    With uniform costs and no latency, the span is N(F+B+W) + max(0, (D-1)(F+B-2W)). Only steps without a barrier
    between them gain from it: for F = B = W, the makespan is no smaller than that of ZB-H1.

    Source: Qi et al. 2024 (zero bubble), arXiv:2401.10241, section 2.2.
    """
    cap = _cap(shape, 2 * shape.devices - 1)
    work = max(map(sum, zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True)))

    def optimal(found: Ordered) -> bool:
        return found.span <= found.schedule.microbatches * work * (1 + 1e-12)

    policies = _policies(cap, lambda s: max(1, cap - 2 * s), (("B", "F", "W"), ("F", "B", "W")), leads_first=False)
    return _search("zb-h2", shape, costs, policies, lambda o: (o.span, o.makespan), optimal, warm_up=shape.devices)


def _cap(shape: Shape, usual: int) -> int:
    """Limit on live ids per device: the family's own, or a smaller one from the user, who counts micro-batches."""
    if shape.memory_limit is None:
        return usual
    if shape.memory_limit < 1:
        raise ScheduleError(
            "memory_limit", f"{shape.memory_limit:g} activations; every stage needs one", "use a number >= 1"
        )
    return min(usual, math.floor(shape.memory_limit * shape.slices))


def _policies(
    cap: int, ahead: Callable[[int], int], kinds: tuple[tuple[Kind, ...], ...], leads_first: bool
) -> list[Policy]:
    """The policies to try, those that win at even costs first."""
    return [
        Policy(kinds=order, patience=patience, limit=cap, ahead=lead)
        for lead in ((ahead, None) if leads_first else (None, ahead))
        for patience in (0.0, 0.5, 0.75, 1.0)
        for order in kinds
    ]


def _timed(schedule: Schedule, costs: CostTable) -> Ordered:
    """An order with its length; W right after B leaves the bubbles of 1F1B, and is shorter where policies find none."""
    graph = link(schedule)
    done = walk(graph, costs.durations(schedule, graph.tasks), costs.comm)
    spans = [max(done.end[a:b]) - done.start[a] for a, b in itertools.pairwise(graph.first)]
    return Ordered(schedule, max(done.end), max(spans))


def _search(
    name: str,
    shape: Shape,
    costs: CostTable,
    policies: list[Policy],
    score: Score,
    done: Callable[[Ordered], bool],
    warm_up: int = 0,
) -> Schedule:
    """The order of the best policy. With many micro-batches, only a short step is ordered and then extended."""
    depth, count = shape.devices, shape.microbatches
    placement = tuple(range(depth))
    rounds = warm_up + 2 * depth + 8
    if shape.slices > 1:  # backwards do not run in ascending order, so there is no turn that repeats
        count = rounds = count * shape.slices
    step = Unordered(whole_step(name, placement, min(count, rounds), Rules(slices=shape.slices)), costs)
    best: tuple[Ordered, Policy] | None = None
    for policy in policies:
        found = ordered(step, policy)
        if found is not None and (best is None or score(found) < score(best[0])):
            best = found, policy
            if done(found):
                break
    if shape.slices > 1 and shape.memory_limit is None:
        plain = _timed(replace(split_backward(one_f_one_b(shape, costs)), name=name), costs)
        best = (plain, policies[0]) if best is None or score(plain) < score(best[0]) else best
    if best is None:  # cannot be: even a limit of one activation always leaves a device something to run
        raise ScheduleError(name, "no order found", "raise the memory limit")
    if count <= rounds:
        return best[0].schedule
    for turn in (1, 2, 3):
        short = rounds + (count - rounds) % turn
        found = best[0] if short == rounds else order_greedily(whole_step(name, placement, short), costs, best[1])
        longer = repeat_steady_state(found.schedule, count, costs, turn) if found is not None else None
        if longer is not None:
            return longer
    whole = order_greedily(whole_step(name, placement, count), costs, best[1])
    return best[0].schedule if whole is None else whole.schedule
