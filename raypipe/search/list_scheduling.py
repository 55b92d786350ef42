"""List scheduling under a memory limit: a free device starts the ready task with the highest priority.

This is the inner loop of the search, in machine code (``list_kernel``). It works on flat arrays of numbers, without
task objects; the next tasks of a device's lanes are its only queue, because the tasks of a lane run in turn.

``decode`` turns desired start times into a memory-feasible order (ruin and recreate). Where devices' memory is full,
hardly any single move of a walk keeps the limit; rebuilding the order from perturbed start times does. This resembles
iterated greedy (Ruiz and Stuetzle 2007) over random keys (Bean 1994).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from raypipe.schedule.ir import backwards
from raypipe.schedule.kinds import BACKWARD
from raypipe.search.problem import DeviceOrders, Problem, lane_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from raypipe.search.list_kernel import Flat


Reserve = Literal["stages", "safe", "none"]


@dataclass(frozen=True, slots=True)
class Setting:
    """How a free device chooses its next task."""

    key: tuple[float, ...]
    """Per lane; the ready task with the smallest ``key + pace * m`` runs first (m: its number in the lane)."""
    pace: float = 0.0
    """Weight of m: a small one prefers lanes, a large one prefers old micro-batches."""
    patience: tuple[float, ...] = ()
    """Per lane, seconds: stay idle rather than start its task if a task of higher priority arrives within them."""
    ahead: tuple[float, ...] = ()
    """Per lane that allocates memory, how many forwards it may run ahead of its stage's input gradients."""
    reserve: Reserve = "stages"
    """How deadlock is avoided. ``stages`` keeps one activation free for every later stage of the device that will need
    one and holds none. ``safe`` runs the slower check that all micro-batches in flight can finish. ``none`` does
    nothing."""


class Listed(NamedTuple):
    """An order that list scheduling built."""

    orders: DeviceOrders
    ends: list[float]
    """Per device, when its last task ends."""
    spans: list[float]
    """Per device, from its first start to that end."""

    @property
    def makespan(self) -> float:
        """When the last task of all ends."""
        return max(self.ends)

    @property
    def span(self) -> float:
        """The longest of the devices' spans."""
        return max(self.spans)


@dataclass(slots=True)
class LaneArrays:
    """A problem as the flat arrays that list scheduling reads, derived once."""

    problem: Problem
    in_turn: list[int]
    """All lanes in topological order."""
    kind: NDArray[Any]
    """Per lane, whether it is a forward, an input gradient or a weight gradient, as the kernels number them."""
    lane: NDArray[Any]
    """Per task, its lane."""
    flat: Flat
    several: bool
    """Whether some device of limited memory holds several stages: only there can devices deadlock."""

    @staticmethod
    def of(p: Problem) -> LaneArrays:
        """Derive the arrays from a problem."""
        from raypipe.search.list_kernel import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Flat

        lanes, rows = range(len(p.kind)), range(len(p.placement))
        names = sorted({(p.replica[c], p.stage[c]) for c in lanes})
        index = {name: g for g, name in enumerate(names)}
        group = [index[p.replica[c], p.stage[c]] for c in lanes]
        of_stage = backwards(p.graph, p.rules)
        lead = []
        for c in lanes:
            back = of_stage[p.stage[c]]
            ends = p.kind[c] in BACKWARD or (p.kind[c] == "W" and not back.input_grad)
            lead.append(1 if p.kind[c] == "F" and back.exists else -1 if ends else 0)
        allocating = [[e for e in p.lanes_of[p.device[c]] if p.takes[c] and p.takes[e]] for c in lanes]
        later = [[e for e in own if group[e] > group[c]] for c, own in enumerate(allocating)]
        begins = {p.replica[c]: c for c in reversed(lanes) if p.kind[c] == "F"}
        near = [[e for e, _ in p.before[c] if p.device[e] == p.device[c]] for c in lanes]
        firsts = [[c for c in lanes if p.replica[c] == r and p.kind[c] == "F"] for r in rows]
        lasts = [[c for c in lanes if p.replica[c] == r and p.kind[c] in of_stage[p.stage[c]].last] for r in rows]
        claims = [[c for c in lanes if p.replica[c] == r and p.takes[c]] for r in rows]
        brief = [p.kind[c] == "R" or p.frees[c] > 0 for own in claims for c in own]
        returns = [[c for c in lanes if p.replica[c] == r and p.frees[c]] for r in rows]
        flat = Flat(
            floats(p.time),
            ints(p.count),
            ints(p.base),
            ints(p.device),
            floats(p.takes),
            floats(p.frees),
            floats(p.cap),
            ints(group),
            ints(lead),
            ints([begins[r] for r in p.replica]),
            floats([float(len(own)) for own in p.before]),
            *_joined([[e for e, _ in own] for own in p.after]),
            floats([lag for own in p.after for _, lag in own]),
            *_joined(near),
            *_joined(later),
            *_joined(p.lanes_of),
            *_joined(firsts),
            *_joined(lasts),
            *_joined(claims),
            ints(brief),
            *_joined(returns),
        )
        kind = ints(FORWARD if k in ("F", "R") else WEIGHT_GRAD if k == "W" else INPUT_GRAD for k in p.kind)
        several = any(
            p.cap[p.device[c]] < math.inf and any(group[e] != group[c] for e in own) for c, own in enumerate(allocating)
        )
        return LaneArrays(p, lane_order(p), kind, ints(p.lane), flat, several)

    def orders(self, tasks: NDArray[Any], places: NDArray[Any]) -> DeviceOrders:
        """Split all tasks, device by device, where ``places`` says that each device's begin."""
        whole, at = tasks.tolist(), places.tolist()
        return [whole[a:b] for a, b in pairwise(at)]


def floats(values: Sequence[float]) -> NDArray[Any]:
    """The values as the kernels take them."""
    import numpy as np

    return np.array(values, np.float64)


def ints(values: Iterable[int]) -> NDArray[Any]:
    """The values as the kernels take them."""
    import numpy as np

    return np.array(list(values), np.int64)


def _joined(rows: Sequence[Sequence[int]]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Where each row begins in all rows one after another, and these."""
    return ints(accumulate(map(len, rows), initial=0)), ints(x for row in rows for x in row)


def list_schedule(layout: LaneArrays, setting: Setting) -> Listed | None:
    """Order all tasks, in time proportional to tasks times lanes per device.

    Returns:
        The order, or None on a deadlock: the limits leave every device waiting.
    """
    from raypipe.search import list_kernel as kernel

    lanes = len(setting.key)
    whole, tasks, places, ends, spans = kernel.by_priority(
        layout.flat,
        floats(setting.key),
        float(setting.pace),
        floats(setting.patience or (0.0,) * lanes),
        floats(setting.ahead or (math.inf,) * lanes),
        {"stages": kernel.STAGES, "safe": kernel.SAFE, "none": kernel.NONE}[setting.reserve],
    )
    return Listed(layout.orders(tasks, places), ends.tolist(), spans.tolist()) if whole else None


def decode(layout: LaneArrays, wish: Sequence[float], patience: float) -> DeviceOrders | None:
    """Run tasks in the order of their desired start times, as far as dependencies and memory allow.

    Args:
        layout: the problem.
        wish: desired start per task, ascending within each lane.
        patience: a free device stays idle, rather than start a ready task, if another task that is not ready yet has
            a desired start earlier by more than this.

    Returns:
        The order, or None on a deadlock: every device waits for memory.
    """
    from raypipe.search import list_kernel as kernel

    lanes = len(layout.in_turn)
    whole, tasks, places, _, _ = kernel.list_schedule(
        layout.flat,
        floats(wish),
        float(patience),
        floats((0.0,) * lanes),
        floats((math.inf,) * lanes),
        kernel.SAFE if layout.several else kernel.NONE,
        math.inf,
        1.0,
        False,
    )
    return layout.orders(tasks, places) if whole else None


def disturbed(layout: LaneArrays, starts: Sequence[float], makespan: float, rng: random.Random) -> list[float]:
    """Perturb the start times of an order: within a time window, for single micro-batches, or on one device.

    The result respects dependencies and lanes: no task's desired start lies before those of its predecessors.
    """
    p = layout.problem
    wish = list(starts)
    draw = rng.random()
    if draw < 0.4:
        far = makespan * rng.choice((0.02, 0.05, 0.1, 0.2))
        begin = rng.uniform(-0.2, 1.0) * makespan
        end = begin + rng.uniform(0.1, 0.5) * makespan
        for t, at in enumerate(starts):
            if begin <= at <= end:
                wish[t] += rng.gauss(0, far)
    elif draw < 0.7:
        for _ in range(rng.choice((1, 1, 2))):
            c = rng.randrange(len(p.kind))
            if p.count[c]:
                m, by = rng.randrange(p.count[c]), rng.gauss(0, makespan * 0.1)
                for e in range(len(p.kind)):
                    if p.replica[e] == p.replica[c] and rng.random() < 0.9:
                        wish[p.base[e] + m] += by
    else:
        far = makespan * rng.choice((0.05, 0.1, 0.2))
        for c in p.lanes_of[rng.randrange(p.devices)]:
            for t in range(p.base[c], p.base[c] + p.count[c]):
                if rng.random() < 0.3:
                    wish[t] += rng.gauss(0, far)
    tiny = 1e-9 * max(1.0, makespan)
    for c in layout.in_turn:
        base, least = p.base[c], float("-inf")
        for m in range(p.count[c]):
            least = max([least, wish[base + m], *(wish[p.base[e] + m] + tiny for e, _ in p.before[c])])
            wish[base + m] = least
            least += tiny
    return wish
