"""The least step of a tiny model over every cut, every placement and every order, by constraint programming.

Written from the definitions, without anything of ``raypipe.plan``: every way to cut the layers into runs and to give
each run a device is tried; the order is CP-SAT's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

from ortools.sat.python import cp_model


def arrangements(layers: int, devices: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(first layer of each stage, device of each stage); devices that are alike are numbered as they come."""
    for count in range(layers):
        for borders in combinations(range(1, layers), count):
            for row in product(range(devices), repeat=count + 1):
                if all(d <= max((-1, *row[:s])) + 1 for s, d in enumerate(row)):
                    yield (0, *borders), row


def optimum(
    forward: Sequence[int], input_grad: Sequence[int], weight_grad: Sequence[int], devices: int, count: int,
    message: int = 0, kept: Sequence[int] | None = None, room: int | None = None,
) -> int:  # fmt: skip
    """The least makespan; ``kept`` per layer lies in a device's memory, ``room``, from its stage's F to its W."""
    best = 10**9
    for starts, row in arrangements(len(forward), devices):
        best = min(best, least_order(starts, row, forward, input_grad, weight_grad, count, message, kept, room, best))
    return best


def least_order(
    starts: Sequence[int], row: Sequence[int], forward: Sequence[int], input_grad: Sequence[int],
    weight_grad: Sequence[int], count: int, message: int, kept: Sequence[int] | None, room: int | None, known: int,
) -> int:  # fmt: skip
    """The least makespan of one arrangement, if it is below ``known``; else that."""
    ends = (*starts[1:], len(forward))
    stages = range(len(starts))
    f, b, w = ([sum(x[a:e]) for a, e in zip(starts, ends, strict=True)] for x in (forward, input_grad, weight_grad))
    size = [sum((kept or [0] * len(forward))[a:e]) for a, e in zip(starts, ends, strict=True)]
    work = [0] * (1 + max(row))
    held = [0] * (1 + max(row))
    for s in stages:
        work[row[s]] += count * (f[s] + b[s] + w[s])
        held[row[s]] += size[s]
    if max(work) >= known or (room is not None and max(held) > room):
        return known
    model = cp_model.CpModel()
    end = model.new_int_var(0, known, "")
    start = {(k, s, m): model.new_int_var(0, known, "") for k in "FBW" for s in stages for m in range(count)}
    busy, live = [[] for _ in work], [[] for _ in work]
    for (k, s, m), at in start.items():
        time = {"F": f, "B": b, "W": w}[k][s]
        busy[row[s]].append(model.new_fixed_size_interval_var(at, time, ""))
        model.add(end >= at + time)
        if m:
            model.add(at >= start[k, s, m - 1] + time)
        lag = message if s and row[s] != row[s - 1] else 0
        if k == "F":
            if s:
                model.add(at >= start["F", s - 1, m] + f[s - 1] + lag)
            span, last = model.new_int_var(0, known, ""), model.new_int_var(0, known, "")
            model.add(last == start["W", s, m] + w[s])
            live[row[s]].append((model.new_interval_var(at, span, last, ""), size[s]))
        elif k == "B":
            model.add(at >= start["F", s, m] + f[s])
            if s:
                model.add(start["B", s - 1, m] >= at + b[s] + lag)
        else:
            model.add(at >= start["B", s, m] + b[s])
    for d in range(len(work)):
        model.add_no_overlap(busy[d])
        if room is not None and live[d]:
            spans, sizes = zip(*live[d], strict=True)
            model.add_cumulative(spans, sizes, room)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = 20
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return known
    assert status == cp_model.OPTIMAL, "too large for this judge"
    return min(known, round(solver.objective_value))
