"""Tabu search along the critical path.

The makespan only falls if a task of the critical path moves to the edge of its block (a run of critical tasks of one
device without a gap) or beyond: Nowicki and Smutnicki 1996; Balas and Vazacopoulos 1998 for moves past several tasks
and their estimates. The memory limit is part of a device's order, so that a move either keeps it or is no move.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from raypipe.auto.problem import Problem, Words
from raypipe.auto.timed import Move, Timed

_PATIENCE = 400
"""Moves without a better order before the search goes back to the best one."""


def improve(
    p: Problem, start: Words, goal: float, until: float, rng: random.Random,
    better: Callable[[Words, float], None] | None = None, moves: int = 1_000_000_000,
) -> tuple[Words, float]:  # fmt: skip
    """Shorten an order until it reaches ``goal``, the clock (``time.monotonic``) reaches ``until``, or moves run out.

    Args:
        p: the problem.
        start: an order that can run.
        goal: a proven bound.
        until: when to stop.
        rng: which of equals to take.
        better: told of every improvement.
        moves: most moves to make.
    """
    state = Timed(p)
    state.load(start)
    best, best_words = state.makespan, start
    tiny = 1e-9 * max(1.0, best)
    tabu: dict[tuple[int, int], int] = {}
    since, turn, tries = 0, 0, 0
    while best > goal + tiny and turn < moves and time.monotonic() < until:
        turn += 1
        candidates = _neighbours(state, rng, tiny)
        chosen = None
        for value, _, move in sorted(candidates, key=lambda c: c[:2]):
            if value >= best - tiny and _is_tabu(move, tabu, turn):
                continue
            chosen = move
            if state.apply(move):
                break
            chosen = None
        if chosen is None:
            since = _PATIENCE * 10
        else:
            _forbid(chosen, tabu, turn + 8 + rng.randrange(12))
            since += 1
        if state.makespan < best - tiny:
            best, best_words, since, tries = state.makespan, state.words(), 0, 0
            if better is not None:
                better(best_words, best)
        elif since > _PATIENCE * (1 + tries):
            tries = min(tries + 1, 8)
            since = 0
            tabu.clear()
            state.load(best_words)
            for _ in range(rng.randrange(1, 4 + 2 * tries)):
                _kick(state, rng, tiny)
    return best_words, best


def _forbid(move: Move, tabu: dict[tuple[int, int], int], until: int) -> None:
    """The pairs just reversed must not be turned back for a while."""
    for t in move.passed:
        tabu[(t, move.task) if move.left else (move.task, t)] = until


def _is_tabu(move: Move, tabu: dict[tuple[int, int], int], turn: int) -> bool:
    pairs = ((move.task, t) if move.left else (t, move.task) for t in move.passed)
    return any(tabu.get(pair, 0) > turn for pair in pairs)


def _blocks(state: Timed, rng: random.Random, tiny: float) -> list[list[int]]:
    """One critical path, drawn at random where several are equally long, as runs of tasks on one device."""
    n = state.problem.tasks
    end, time, prev, before = state.end, state.time, state.prev, state.before
    t = rng.choice([t for t in state.last if end[t] >= state.makespan - tiny])
    blocks = [[t]]
    while True:
        at = end[t] - time[t]
        ways = [q for q, lag in before[t] if end[q] + lag >= at - tiny]
        here = prev[t]
        if here != n and end[here] >= at - tiny and here not in ways:
            ways.append(here)
        if not ways or at <= tiny:
            if here != n and end[here] >= at - tiny:
                ways = [here]
            else:
                break
        q = ways[0] if len(ways) == 1 else rng.choice(ways)
        if q == here:
            blocks[-1].append(q)
        else:
            blocks.append([q])
        t = q
    return [b[::-1] for b in blocks if len(b) > 1]


def _neighbours(state: Timed, rng: random.Random, tiny: float, most: int = 32) -> list[tuple[float, float, Move]]:
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
    """Task k of the block as far left and as far right as it may go, and by one place."""
    task, found = block[k], []
    reach = k
    while reach and state.allowed(task, block[reach - 1], True):
        reach -= 1
    for to in {reach, k - 1} if reach < k else ():
        move = Move(task, block[to:k], True)
        if state.fits(move):
            found.append(move)
    reach = k
    while reach + 1 < len(block) and state.allowed(task, block[reach + 1], False):
        reach += 1
    for to in {reach, k + 1} if reach > k else ():
        move = Move(task, block[k + 1 : to + 1], False)
        if state.fits(move):
            found.append(move)
    return found


def _kick(state: Timed, rng: random.Random, tiny: float) -> None:
    """A random move, good or bad."""
    moves = [move for block in _blocks(state, rng, tiny) for k in range(len(block)) for move in _moves(state, block, k)]
    rng.shuffle(moves)
    for move in moves:
        if state.apply(move):
            return
