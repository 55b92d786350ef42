"""Tabu search along the critical path.

The makespan only falls if a task of the critical path moves to the edge of its block or beyond; a block is a run of
critical tasks of one device without a gap (Nowicki and Smutnicki 1996). Moves past several tasks and their estimates
follow Balas and Vazacopoulos 1998. Moves that break the memory limit are discarded.
"""

from __future__ import annotations

import random

from raypipe.search.budget import Budget
from raypipe.search.problem import DeviceOrders, Problem
from raypipe.search.timed_order import Arcs, Frame, Move, Step, TimedOrder

_PATIENCE = 400
"""After this many moves without a better order, the search goes back to the best one."""


def improve(
    p: Problem,
    start: DeviceOrders,
    goal: float,
    budget: Budget,
    rng: random.Random,
    moves: int,
    frame: Frame | None = None,
    arcs: Arcs | None = None,
) -> tuple[DeviceOrders, float]:
    """Shorten an order until it reaches ``goal`` or the budget or the moves run out.

    Args:
        p: the problem.
        start: an order that can run.
        goal: value at which to stop, for example a lower bound.
        budget: budget of the whole search.
        rng: breaks ties and draws critical paths.
        moves: largest number of moves.
        frame: what is minimised; by default the makespan.
        arcs: the problem's ``Arcs``, where the caller has them already.

    Returns:
        The best order, and its value in ``frame``.
    """
    state = TimedOrder(p, frame, arcs)
    state.load(start)
    best, best_orders = state.value, start
    tiny = 1e-9 * max(1.0, best)
    tabu: dict[tuple[int, int], int] = {}
    since, turn, tries = 0, 0, 0
    while best > goal + tiny and turn < moves and budget.left > 0:
        turn += 1
        candidates = _neighbours(state, rng, tiny)
        chosen = None
        for value, _, move in sorted(candidates, key=lambda c: c[:2]):
            if value >= best - tiny and any(tabu.get((b, a), 0) > turn for a, b in _reversed(move)):
                continue
            chosen = move
            if state.apply(move):
                break
            chosen = None
        if chosen is None:
            since = _PATIENCE * 10
        else:
            tabu.update(dict.fromkeys(_reversed(chosen), turn + 8 + rng.randrange(12)))
            since += 1
        if state.value < best - tiny:
            best, best_orders, since, tries = state.value, state.orders(), 0, 0
        elif since > _PATIENCE * (1 + tries):
            tries = min(tries + 1, 8)
            since = 0
            tabu.clear()
            state.load(best_orders)
            for _ in range(rng.randrange(1, 4 + 2 * tries)):
                _kick(state, rng, tiny)
    return best_orders, best


def _reversed(move: Move) -> list[tuple[int, int]]:
    """Pairs ``(earlier, later)`` of tasks whose order the move reverses."""
    return [(t, s.task) if s.left else (s.task, t) for s in move.steps for t in s.passed]


def _blocks(state: TimedOrder, rng: random.Random, tiny: float) -> list[list[int]]:
    """The blocks of one critical path, drawn at random where several are equally long; single tasks are left out."""
    n = state.problem.tasks
    end, time, prev, before = state.end, state.time, state.prev, state.before
    rest = state.rest
    t = rng.choice([t for d, t in enumerate(state.last) if t < n and end[t] + rest[n + d] >= state.value - tiny])
    blocks, block = [], [t]
    while True:
        at = end[t] - time[t] - tiny
        same_device = prev[t]
        result = same_device if same_device < n and end[same_device] >= at else -1
        if at > 0:
            for q, lag in before[t]:
                if end[q] + lag >= at and (result < 0 or (q != result and rng.random() < 0.5)):
                    result = q
        if result < 0:
            break
        if result != same_device:
            if len(block) > 1:
                blocks.append(block[::-1])
            block = []
        block.append(result)
        t = result
    if len(block) > 1:
        blocks.append(block[::-1])
    return blocks


def _neighbours(state: TimedOrder, rng: random.Random, tiny: float, most: int = 8) -> list[tuple[float, float, Move]]:
    """``(estimate, tie-break, move)`` of moves within the blocks of one critical path."""
    result: list[tuple[float, float, Move]] = []
    places = [(b, k) for b in _blocks(state, rng, tiny) for k in range(len(b))]
    if len(places) > most:
        places = rng.sample(places, most)
    for block, k in places:
        for move in _moves(state, block, k):
            result.append((state.estimate(move), rng.random(), move))
    return result


def _moves(state: TimedOrder, block: list[int], k: int) -> list[Move]:
    """Moves of task k of the block: as far left and right as dependencies allow, and by one place.

    Where a move breaks the memory limit, a later task that frees memory may be pulled in front of it.
    """
    task, result, lane = block[k], [], state.lane
    fixed, own = state.bound_to[task], lane[task]
    reach = k
    while reach and lane[block[reach - 1]] != own and block[reach - 1] not in fixed:
        reach -= 1
    for to in {reach, k - 1} if reach < k else ():
        result.append(Move.single(task, block[to:k], True))
    reach = k
    final = len(block) - 1
    while reach < final and lane[block[reach + 1]] != own and block[reach + 1] not in fixed:
        reach += 1
    for to in {reach, k + 1} if reach > k else ():
        result.append(Move.single(task, block[k + 1 : to + 1], False))
    if not state.limited:
        return result
    kept: list[Move] = []
    for move in result:
        if state.fits(move):
            kept.append(move)
        else:
            kept += _after_freeing(state, move)
    return kept


def _after_freeing(state: TimedOrder, move: Move, look: int = 12) -> list[Move]:
    """The move with a task that frees memory, one of the next ``look``, pulled to its front; empty if none helps."""
    n, lane, frees = state.problem.tasks, state.lane, state.problem.frees
    lanes = {lane[t] for t in move.row}
    met = set(move.row)
    helper = state.next[move.last]
    between: list[int] = []
    for _ in range(look):
        if helper >= n:
            break
        c = lane[helper]
        if frees[c] and c not in lanes and met.isdisjoint(state.bound_to[helper]):
            step = move.steps[0]
            now = [*step.passed, step.task] if step.left else [step.task, *step.passed]
            longer = Move(
                (Step(helper, [*now, *between], True), step), [helper, *move.row, *between], move.first, helper
            )
            if state.fits(longer):
                return [longer]
        between.append(helper)
        lanes.add(c)
        met.add(helper)
        helper = state.next[helper]
    return []


def _kick(state: TimedOrder, rng: random.Random, tiny: float) -> None:
    """Apply a random move, whether it helps or not."""
    places = [(block, k) for block in _blocks(state, rng, tiny) for k in range(len(block))]
    while places:
        at = rng.randrange(len(places))
        block, k = places[at]
        places[at] = places[-1]
        places.pop()
        moves = _moves(state, block, k)
        rng.shuffle(moves)
        if any(state.apply(move) for move in moves):
            return
