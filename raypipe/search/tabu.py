"""Tabu search along the critical path.

The makespan only falls if a task of the critical path moves to the edge of its block (a run of critical tasks of one
device without a gap) or beyond: Nowicki and Smutnicki 1996; Balas and Vazacopoulos 1998 for moves past several tasks
and their estimates. The memory limit is part of a device's order, so that a move either keeps it or is no move.
"""

from __future__ import annotations

import random

from raypipe.search.budget import Budget
from raypipe.search.problem import Problem, Words
from raypipe.search.timed_order import Arcs, Frame, Move, Step, Timed

_PATIENCE = 400
"""Moves without a better order before the search goes back to the best one."""


def improve(
    p: Problem, start: Words, goal: float, budget: Budget, rng: random.Random, moves: int, frame: Frame | None = None,
    arcs: Arcs | None = None,
) -> tuple[Words, float]:  # fmt: skip
    """Shorten an order until it reaches ``goal``, or the budget or the moves run out.

    Args:
        p: the problem.
        start: an order that can run.
        goal: a proven bound.
        budget: of the whole search.
        rng: which of equals to take.
        moves: most moves to make.
        frame: what is measured and made small; default the makespan.
        arcs: of the problem, where the caller has them.

    Returns:
        The best order, and its value in ``frame``.
    """
    state = Timed(p, frame, arcs)
    state.load(start)
    best, best_words = state.value, start
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
            best, best_words, since, tries = state.value, state.words(), 0, 0
        elif since > _PATIENCE * (1 + tries):
            tries = min(tries + 1, 8)
            since = 0
            tabu.clear()
            state.load(best_words)
            for _ in range(rng.randrange(1, 4 + 2 * tries)):
                _kick(state, rng, tiny)
    return best_words, best


def _reversed(move: Move) -> list[tuple[int, int]]:
    """Pairs (earlier, later) that the move turns round."""
    return [(t, s.task) if s.left else (s.task, t) for s in move.steps for t in s.passed]


def _blocks(state: Timed, rng: random.Random, tiny: float) -> list[list[int]]:
    """One critical path, drawn at random where several are equally long, as runs of tasks on one device."""
    n = state.problem.tasks
    end, time, prev, before = state.end, state.time, state.prev, state.before
    rest = state.rest
    t = rng.choice([t for d, t in enumerate(state.last) if t < n and end[t] + rest[n + d] >= state.value - tiny])
    blocks, block = [], [t]
    while True:
        at = end[t] - time[t] - tiny
        here = prev[t]
        found = here if here < n and end[here] >= at else -1
        if at > 0:
            for q, lag in before[t]:
                if end[q] + lag >= at and (found < 0 or (q != found and rng.random() < 0.5)):
                    found = q
        if found < 0:
            break
        if found != here:
            if len(block) > 1:
                blocks.append(block[::-1])
            block = []
        block.append(found)
        t = found
    if len(block) > 1:
        blocks.append(block[::-1])
    return blocks


def _neighbours(state: Timed, rng: random.Random, tiny: float, most: int = 8) -> list[tuple[float, float, Move]]:
    """Moves within the blocks of one critical path, with their estimates."""
    found: list[tuple[float, float, Move]] = []
    places = [(b, k) for b in _blocks(state, rng, tiny) for k in range(len(b))]
    if len(places) > most:
        places = rng.sample(places, most)
    for block, k in places:
        for move in _moves(state, block, k):
            found.append((state.estimate(move), rng.random(), move))
    return found


def _moves(state: Timed, block: list[int], k: int) -> list[Move]:
    """Task k of the block as far left and as far right as it may go, and by one place.

    Where memory forbids it, another stage's weight gradient that waits further on comes along in front.
    """
    task, found, lane = block[k], [], state.lane
    fixed, own = state.bound_to[task], lane[task]
    reach = k
    while reach and lane[block[reach - 1]] != own and block[reach - 1] not in fixed:
        reach -= 1
    for to in {reach, k - 1} if reach < k else ():
        found.append(Move.single(task, block[to:k], True))
    reach = k
    final = len(block) - 1
    while reach < final and lane[block[reach + 1]] != own and block[reach + 1] not in fixed:
        reach += 1
    for to in {reach, k + 1} if reach > k else ():
        found.append(Move.single(task, block[k + 1 : to + 1], False))
    if not state.limited:
        return found
    kept: list[Move] = []
    for move in found:
        if state.fits(move):
            kept.append(move)
        else:
            kept += _with_relief(state, move)
    return kept


def _with_relief(state: Timed, move: Move, look: int = 12) -> list[Move]:
    """The move, preceded by pulling a task that frees memory from further on to the front of the run."""
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
            )  # fmt: skip
            if state.fits(longer):
                return [longer]
        between.append(helper)
        lanes.add(c)
        met.add(helper)
        helper = state.next[helper]
    return []


def _kick(state: Timed, rng: random.Random, tiny: float) -> None:
    """A random move, good or bad."""
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
