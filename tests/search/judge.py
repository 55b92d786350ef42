"""The exact judge of small cases: the same step as a constraint program, solved by CP-SAT (OR-tools).

Written from the definitions and not from ``raypipe.search``: tasks are (kind, stage, micro-batch) with their own
dependency rule, devices run one at a time, an activation lives from the start of F to the end of W or BW.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ortools.sat.python import cp_model


class Verdict(NamedTuple):
    makespan: int
    bound: int
    order: list[tuple[int, str, int, int, int]]
    """(start, kind, stage, micro-batch, device)."""


def judge(
    placement: Sequence[Sequence[int]], count: int, forward: Sequence[int], input_grad: Sequence[int],
    weight_grad: Sequence[int], latency: int | Sequence[int], memory: int | None, split: bool = True,
    seconds: float = 10.0, hint: int | None = None, freed_by: str = "W", span: bool = False,
) -> Verdict:  # fmt: skip
    """The least makespan that is found and the greatest bound that is proven (equal if solved) for a chain of stages.

    Whole-number costs. Micro-batch m belongs to replica m mod the number of replicas; those of one replica are alike,
    so they are taken in turn. ``latency`` is that of every message, or a list: of the link behind each stage. ``hint``
    is a makespan that is known to be possible; it is given back, without an order,
    where the time does not suffice to find one. ``freed_by``: an activation lives to the end of its W, or of its B.
    ``span``: the longest device's time from its first start to its last end instead of the makespan (one replica).
    """
    model = cp_model.CpModel()
    stages, replicas = len(placement[0]), len(placement)
    links = [latency] * stages if isinstance(latency, int) else list(latency)
    devices = 1 + max(max(row) for row in placement)
    work = [f + b + w for f, b, w in zip(forward, input_grad, weight_grad, strict=True)]
    horizon = hint if hint is not None else sum(work) * count + 2 * sum(links) * count
    end = model.new_int_var(0, horizon, "end")
    begun = [0] * devices
    if span:  # of a single chain: a device's first task is the first micro-batch's, as early as it gets there
        first = {row: s for s, row in reversed(list(enumerate(placement[0])))}
        far = [links[s] if placement[0][s] != placement[0][s + 1] else 0 for s in range(stages - 1)]
        begun = [sum(forward[:s]) + sum(far[:s]) for _, s in sorted(first.items())]
    start: dict[tuple[str, int, int], cp_model.IntVar] = {}
    length: dict[str, Sequence[int]] = {"F": forward, "B": input_grad, "W": weight_grad}
    if not split:
        length = {"F": forward, "B": [b + w for b, w in zip(input_grad, weight_grad, strict=True)]}
    busy: list[list[cp_model.IntervalVar]] = [[] for _ in range(devices)]
    held: list[list[cp_model.IntervalVar]] = [[] for _ in range(devices)]
    last = freed_by if split else "B"
    for m in range(count):
        row = placement[m % replicas]
        for s in range(stages):
            for kind, times in length.items():
                begin = start[kind, s, m] = model.new_int_var(0, horizon, f"{s}{kind}{m}")
                busy[row[s]].append(model.new_fixed_size_interval_var(begin, times[s], f"{s}{kind}{m} runs"))
                model.add(end >= begin + times[s] - begun[row[s]])
            span = model.new_int_var(0, horizon, "")
            done = model.new_int_var(0, horizon, "")
            model.add(done == start[last, s, m] + length[last][s])
            held[row[s]].append(model.new_interval_var(start["F", s, m], span, done, ""))
    for m in range(count):
        row = placement[m % replicas]
        for s in range(stages):
            lag = links[s - 1] if s and row[s] != row[s - 1] else 0
            if s:
                model.add(start["F", s, m] >= start["F", s - 1, m] + forward[s - 1] + lag)
                model.add(start["B", s - 1, m] >= start["B", s, m] + length["B"][s] + lag)
            model.add(start["B", s, m] >= start["F", s, m] + forward[s])
            if split:
                model.add(start["W", s, m] >= start["B", s, m] + input_grad[s])
            if m >= replicas:
                for kind in length:
                    model.add(start[kind, s, m] >= start[kind, s, m - replicas] + length[kind][s])
    for d in range(devices):
        model.add_no_overlap(busy[d])
        if memory is not None:
            model.add_cumulative(held[d], [1] * len(held[d]), memory)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    if status == cp_model.UNKNOWN and hint is not None:  # out of time without an order of its own
        return Verdict(hint, round(solver.best_objective_bound), [])
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
    order = sorted(
        (solver.value(v), kind, s, m, placement[m % replicas][s]) for (kind, s, m), v in start.items()
    )  # fmt: skip
    return Verdict(round(solver.objective_value), round(solver.best_objective_bound), order)
