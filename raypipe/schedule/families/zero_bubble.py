"""Zero bubble: the backward is split, so that weight gradients fill bubbles. ZB-H1, ZB-H2, ZB-V and ZeroPP."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from raypipe.errors import ScheduleError
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.families.greedy import (
    KINDS,
    GreedyOrder,
    Policy,
    Unordered,
    order_greedily,
    ordered,
    ring,
    timed,
    whole_step,
)
from raypipe.schedule.families.textbook import one_f_one_b
from raypipe.schedule.ir import Rules, Schedule, Task
from raypipe.schedule.kinds import Kind
from raypipe.schedule.passes.backward import split_backward
from raypipe.schedule.shape import Shape
from raypipe.schedule.walk import walk

Score = Callable[[GreedyOrder], tuple[float, float]]


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

    def optimal(found: GreedyOrder) -> bool:
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

    def optimal(found: GreedyOrder) -> bool:
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


def _search(
    name: str,
    shape: Shape,
    costs: CostTable,
    policies: list[Policy],
    score: Score,
    done: Callable[[GreedyOrder], bool],
    warm_up: int = 0,
) -> Schedule:
    """The order of the best policy. With many micro-batches, only a short step is ordered and then extended."""
    depth, count = shape.devices, shape.microbatches
    placement = tuple(range(depth))
    rounds = warm_up + 2 * depth + 8
    if shape.slices > 1:  # backwards do not run in ascending order, so there is no turn that repeats
        count = rounds = count * shape.slices
    step = Unordered(whole_step(name, placement, min(count, rounds), Rules(slices=shape.slices)), costs)
    best: tuple[GreedyOrder, Policy] | None = None
    for policy in policies:
        result = ordered(step, policy)
        if result is not None and (best is None or score(result) < score(best[0])):
            best = result, policy
            if done(result):
                break
    if shape.slices > 1 and shape.memory_limit is None:
        # W right after B leaves the bubbles of 1F1B, and is shorter where policies find none.
        plain = timed(link(replace(split_backward(one_f_one_b(shape, costs)), name=name)), costs)
        best = (plain, policies[0]) if best is None or score(plain) < score(best[0]) else best
    if best is None:  # cannot be: even a limit of one activation always leaves a device something to run
        raise ScheduleError(name, "no order found", "raise the memory limit")
    if count <= rounds:
        return best[0].schedule
    for turn in (1, 2, 3):
        short = rounds + (count - rounds) % turn
        result = best[0] if short == rounds else order_greedily(whole_step(name, placement, short), costs, best[1])
        longer = repeat_steady_state(result.schedule, count, costs, turn) if result is not None else None
        if longer is not None:
            return longer
    whole = order_greedily(whole_step(name, placement, count), costs, best[1])
    return best[0].schedule if whole is None else whole.schedule


_new = tuple.__new__  # takes a quarter of the time of Task(...), which dominates for long schedules


def repeat_steady_state(schedule: Schedule, count: int, costs: CostTable, turn: int = 1) -> Schedule | None:
    """Extend the schedule to ``count`` micro-batches; None if it has no steady state to repeat.

    On every device, the tasks from one forward to the forward ``turn`` micro-batches later must equal those of the turn
    before, with as many of each kind. That turn is repeated as often as needed.

    Args:
        schedule: a schedule with one stage per device, one micro-batch per task, and ascending ids per kind.
        count: number of micro-batches; larger than the schedule's by a multiple of ``turn``.
        costs: used to check that further turns take no longer than the busiest device's work in them.
        turn: number of micro-batches in a turn.
    """
    have = schedule.microbatches
    forwards = [[k for k, t in enumerate(order) if t.kind == "F"] for order in schedule.orders]
    tried = 0
    for a in sorted(range(turn, have - turn), key=lambda a: abs(a - 3 * have // 4)):
        places: list[tuple[int, int]] = []
        for order, at in zip(schedule.orders, forwards, strict=True):
            if not _repeats(order, at[a - turn], at[a], at[a + turn], turn):
                break
            places.append((at[a], at[a + turn]))
        else:
            if _steady(schedule, places, costs, turn):
                return _repeated(schedule, places, count - have, turn)
            tried += 1
            if tried == 3:
                return None
    return None


def _repeats(order: tuple[Task, ...], before: int, begin: int, end: int, turn: int) -> bool:
    """Return whether the tasks from ``begin`` to ``end`` equal those from ``before``, ``turn`` micro-batches later."""
    if end - begin != 3 * turn or begin - before != 3 * turn:
        return False
    return all(_later(t, turn) == u for t, u in zip(order[before:begin], order[begin:end], strict=True))


def _later(task: Task, by: int) -> Task:
    kind, stage, mbs, replica = task
    return _new(Task, (kind, stage, (mbs[0] + by,), replica))


def _repeated(schedule: Schedule, places: list[tuple[int, int]], extra: int, turn: int) -> Schedule:
    rows = []
    for order, (begin, end) in zip(schedule.orders, places, strict=True):
        row = list(order[:end])
        for by in range(turn, extra + 1, turn):
            row += [_later(t, by) for t in order[begin:end]]
        row += [_later(t, extra) for t in order[end:]]
        rows.append(row)
    return schedule.with_orders(rows, microbatches=schedule.microbatches + extra)


def _steady(schedule: Schedule, places: list[tuple[int, int]], costs: CostTable, turn: int) -> bool:
    """Return whether further turns can run and take no longer than the busiest device's work in them.

    As many turns as devices are simulated, and two more, because a delay takes one turn per device to propagate.
    """
    ends = []
    turns = schedule.devices + 2
    for extra in (0, turns * turn):
        longer = _repeated(schedule, places, extra, turn)
        graph = link(longer)
        done = walk(graph, costs.durations(longer, graph.tasks), costs.comm)
        if done.stuck:
            return False
        ends.append(max(done.end))
    work = max(map(sum, zip(costs.forward, costs.input_grad, costs.weight_grad, strict=True)))
    return ends[1] - ends[0] <= turns * turn * work * (1 + 1e-9)


def zb_v(shape: Shape, costs: CostTable) -> Schedule:
    """Put stages d and 2D-1-d on device d: no bubbles in the span with 1F1B's memory (2D activations of a chunk).

    With F = B = W = 1 per device (1/2 per chunk) and N >= 2D, the span is 3N. For other costs, list scheduling within
    the same memory is also tried, and the order with the smaller span is returned. The first and the last stage share
    device 0, so tied embeddings need no message.

    Source: Qi et al. 2024 (zero bubble), arXiv:2401.10241, section 6; the order: Qi et al. 2024 (controllable
    memory), arXiv:2405.15362, appendix.
    """
    depth, count = shape.devices, shape.microbatches
    cap = 2 * depth
    if shape.memory_limit is not None:
        if shape.memory_limit < 2:
            raise ScheduleError("memory_limit", f"{shape.memory_limit:g} activations; a V needs two", "use 2 or more")
        cap = min(cap, math.floor(shape.memory_limit))
    placement = vee(shape)
    best = _order_of_paper(placement, count)
    span = timed(link(best), costs).span if cap == 2 * depth else math.inf
    work = max(
        count * sum(c[s] for c in (costs.forward, costs.input_grad, costs.weight_grad) for s in (d, 2 * depth - 1 - d))
        for d in range(depth)
    )
    if span > work * (1 + 1e-12) and (span == math.inf or depth * count <= _COMPARED):
        step = Unordered(whole_step("zb-v", placement, count), costs)
        for policy in _policies_of_v(depth, cap):
            result = ordered(step, policy, shorter_than=span)
            if result is not None and result.span < span:
                best, span = result.schedule, result.span
            if span <= work:  # no order is shorter
                break
    if span == math.inf:
        raise ScheduleError(
            "memory_limit", f"no order found within {cap} activations", f"use {2 * depth}, or a smaller problem"
        )
    return best


def vee(shape: Shape) -> tuple[int, ...]:
    """Return the device of each stage: 0 to D-1, then D-1 to 0."""
    return (*range(shape.devices), *reversed(range(shape.devices)))


_COMPARED = 4096
"""Up to this many devices times micro-batches, list scheduling is compared with the textbook order."""


def _policies_of_v(depth: int, cap: int) -> list[Policy]:
    kinds: tuple[tuple[Kind, ...], ...] = (("B", "F", "W"), ("F", "B", "W"))
    ahead = (lambda s: max(1, cap - 1) if s < depth else cap, lambda s: max(1, cap // 2) if s < depth else cap)
    return [
        Policy(kinds=order, patience=patience, limit=cap, ahead=lead, key=_oldest)
        for order in kinds
        for patience in (0.0, 0.5)
        for lead in ahead
    ]


def _oldest(task: Task) -> tuple[int, ...]:
    """Older micro-batches first; of one, the later stage."""
    return task.mbs[0], -task.stage


def _order_of_paper(placement: tuple[int, ...], count: int) -> Schedule:
    """The paper's order: fill with forwards, turn at the bottom of the V, alternate both chunks, then drain."""
    depth = len(placement) // 2
    rows = []
    for d in range(depth):
        row = _OrderOfV(d, 2 * depth - 1 - d, count)
        row.repeat(2 * (depth - d) - 1, "Fd")
        row.repeat(d, "Fu Fd")
        row.repeat(depth - d, "Fu Bu Wu")
        while row.done["F", row.up] < count:
            row.repeat(1, "Fd Bd Wd Fu Bu Wu")
        row.repeat(d, "Bd Bu")
        row.repeat(depth - d, "Bd Wd")
        row.repeat(count, "Bu")
        row.repeat(count, "Bd")
        row.repeat(count, "Wu")
        row.repeat(count, "Wd")
        rows.append(tuple(row.tasks))
    return Schedule.of_chain("zb-v", [placement], rows, count)


class _OrderOfV:
    """Builds a device's order: ``Fd`` is the next forward of the stage down the V, ``Wu`` the next W of the one up."""

    def __init__(self, down: int, up: int, count: int) -> None:
        self.down, self.up, self.count = down, up, count
        self.tasks: list[Task] = []
        self.done: dict[tuple[Kind, int], int] = {(k, s): 0 for k in KINDS for s in (down, up)}

    def repeat(self, times: int, what: str) -> None:
        """Append the named tasks in sequence, ``times`` times; skip tasks that are used up or lack input."""
        for _ in range(times):
            had = len(self.tasks)
            for name in what.split():
                kind = next(k for k in KINDS if k == name[0])
                stage = self.down if name[1] == "d" else self.up
                m = self.done[kind, stage]
                before: dict[Kind, int] = {"F": self.count, "B": self.done["F", stage], "W": self.done["B", stage]}
                if m < before[kind]:
                    self.done[kind, stage] += 1
                    self.tasks.append(Task(kind, stage, (m,)))
            if len(self.tasks) == had:  # nor would any further time add one
                return


def zeropp(shape: Shape, costs: CostTable) -> Schedule:
    """Run units of U micro-batches strictly one after another; V stages per device, stage s on device s mod P.

    Inside a unit, forwards run breadth-first, stage by stage; input gradients as early as possible, the deepest stage
    first; weight gradients in the bubbles and at the end. A stage's micro-batches are contiguous, so that its
    parameters are gathered once for them. A unit's memory, min(N, U)*V activations of a chunk, is free before the next
    unit begins. With F = B = W = 1 and U dividing N, the span is 3VN for U >= 2P-1, and N(2P-1-U)/U more for P <= U <
    2P-1. The last unit may be smaller. A memory limit reduces U.

    Source: ZeroPP, sections 3.1 and 3.2.
    """
    depth, count, chunks = shape.devices, shape.microbatches, shape.chunks
    unit = count if shape.unit is None else shape.unit
    if shape.memory_limit is not None:
        if shape.memory_limit < chunks:
            raise ScheduleError(
                "memory_limit",
                f"{shape.memory_limit:g} activations; one micro-batch needs {chunks}",
                f"use {chunks} or more",
            )
        unit = min(unit, math.floor(shape.memory_limit) // chunks)
    placement = ring(shape)
    units = {n: _unit(placement, n, costs) for n in {unit, count % unit} if n}
    rows: list[list[Task]] = [[] for _ in range(depth)]
    for first in range(0, count, unit):
        for row, order in zip(rows, units[min(unit, count - first)].orders, strict=True):
            row += [Task(t.kind, t.stage, (t.mbs[0] + first,)) for t in order]
    return units[unit].with_orders(rows, microbatches=count)


def _unit(placement: tuple[int, ...], count: int, costs: CostTable) -> Schedule:
    policy = Policy(key=lambda t: (t.stage if t.kind == "F" else -t.stage, t.mbs[0]))
    result = order_greedily(whole_step("zeropp", placement, count), costs, policy)
    if result is None:  # cannot be: this policy has no limits
        raise ScheduleError("zeropp", "no order found", "report this")
    return result.schedule
