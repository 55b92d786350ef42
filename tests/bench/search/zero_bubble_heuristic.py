"""The zero-bubble paper's heuristic, as a baseline for ``auto``: written from its description, not from its code.

Warm up with as many forwards as memory and the first backward allow; then one forward for one backward; a weight
gradient where it fits a gap, and where memory is full; what is left at the end. Three choices are open, so eight
orders are made and the shortest wins.

Source: Qi et al. 2024 (zero bubble), arXiv:2401.10241, section 3.1.
"""

from __future__ import annotations

import heapq
import itertools

from raypipe.schedule.costs import CostTable


def shortest(depth: int, count: int, costs: CostTable, memory: int) -> float:
    """Makespan of the best of the eight on a line of ``depth`` stages with ``memory`` activations each."""
    return min(
        _makespan(depth, count, costs, memory, *choice) for choice in itertools.product((False, True), repeat=3)
    )  # fmt: skip


def _makespan(
    depth: int, count: int, costs: CostTable, memory: int, more_warm_up: bool, backward_first: bool, any_gap: bool
) -> float:
    """One order.

    Args:
        depth: stages, one a device.
        count: micro-batches.
        costs: one value per stage.
        memory: activations a stage may hold.
        more_warm_up: fill the memory with forwards even if the first backward waits for it; else as 1F1B does, one
            fewer at each further stage, there and later.
        backward_first: after warm-up prefer a backward that is there over the forward whose turn it is.
        any_gap: start a weight gradient in a gap that is too short for it.
    """
    never = float("inf")
    f, b, w, links = costs.forward, costs.input_grad, costs.weight_grad, costs.links
    f_at = [[0.0 if s == 0 else never] * count for s in range(depth)]
    b_at = [[never] * count for _ in range(depth)]
    done = [[0, 0, 0] for _ in range(depth)]
    last_was_forward = [False] * depth
    end = [0.0] * depth
    events = [(0.0, s) for s in range(depth)]
    while events:
        now, s = heapq.heappop(events)
        if now < end[s]:
            continue
        nf, nb, nw = done[s]
        room = nf - nw < memory and (more_warm_up or nf - nb < max(1, memory - s))
        forward = f_at[s][nf] if nf < count and room else never
        backward = b_at[s][nb] if nb < nf else never
        pending = nb - nw
        warm = nb == 0 and (more_warm_up or backward > now)
        if warm and forward <= now:
            kind = "F"
        else:
            turn_forward = not last_was_forward[s] and nf < count
            if backward_first and backward <= now:
                turn_forward = False
            wanted = forward if turn_forward and forward < never else backward
            other = backward if wanted is forward else forward
            if wanted <= now:
                kind = "F" if wanted is forward and turn_forward else "B"
            elif pending and (any_gap or min(wanted, other) >= now + w[s] or forward == never):
                kind = "W"
            elif other <= now:
                kind = "B" if wanted is forward else "F"
            else:
                later = min(wanted, other)
                if later < never:
                    heapq.heappush(events, (later, s))
                elif pending:
                    kind = "W"
                    later = now
                if later != now:
                    continue
        if kind == "F":
            end[s] = now + f[s]
            done[s][0] += 1
            if s + 1 < depth:
                f_at[s + 1][nf] = end[s] + links[s]
                heapq.heappush(events, (max(end[s] + links[s], end[s + 1]), s + 1))
            else:
                b_at[s][nf] = end[s]
        elif kind == "B":
            end[s] = now + b[s]
            done[s][1] += 1
            if s:
                b_at[s - 1][nb] = end[s] + links[s - 1]
                heapq.heappush(events, (max(end[s] + links[s - 1], end[s - 1]), s - 1))
        else:
            end[s] = now + w[s]
            done[s][2] += 1
        if kind != "W":
            last_was_forward[s] = kind == "F"
        heapq.heappush(events, (end[s], s))
    assert all(d == [count] * 3 for d in done), "the heuristic did not finish"
    return max(end)
