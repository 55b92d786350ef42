"""``auto`` against makespans that constraint programming proves (``tests/search/judge.py``, CP-SAT)."""

from __future__ import annotations

import time
from collections.abc import Iterator

from raypipe.schedule.costs import CostTable
from raypipe.search import search
from raypipe.search.budget import Budget
from raypipe.search.one_device import one_device_bound
from raypipe.search.order_bounds import lower_bound
from raypipe.search.problem import build
from tests.bench.search.line import Effort, Line
from tests.search.conftest import random_case
from tests.search.judge import judge

DEPTH, COUNT, TIMES, LATENCY = 8, 16, (10, 12, 8), 1
READINGS = ((6, True, "W", 700), (4, True, "W", 912), (4, True, "B", None), (4, False, "W", None))
"""Activations, split backward, the task that frees an activation, and the optimum where the docs name it."""
CLOSE = 0.01
V, LINE = ((0, 1, 2, 3, 3, 2, 1, 0),), (tuple(range(8)),)
SCARCE = (
    (V, 8, (5, 5, 5, 1), 4, 331), (V, 8, (5, 5, 5, 1), 6, 283), (V, 8, (5, 10, 5, 2), 4, 505),
    (V, 8, (5, 10, 5, 2), 6, 406), (V, 8, (5, 10, 5, 2), 8, 372), (LINE, 16, (10, 12, 8, 1), 4, 912),
    (LINE, 16, (10, 12, 8, 1), 6, 700), (V, 16, (5, 5, 5, 1), 4, None), (V, 64, (5, 5, 5, 1), 4, None),
)  # fmt: skip
"""Placement, micro-batches, (F, B, W, message), activations, and the optimum: CP-SAT proves it, in a minute for 331,
but for 283, where an order meets the bound."""
STATES = 250_000
"""What a search of 2.5 s spends on its bound."""


def exact(effort: Effort) -> Iterator[Line]:
    """Random small instances: a line for each that is not optimal, then mean and worst.

    An instance that is not solved in 20 s counts against its bound, which overstates the gap.
    """
    gaps, unsolved, began = [], 0, time.monotonic()
    for seed in range(effort.first, effort.first + effort.count):
        case = random_case(seed)
        result = case.search(budget=Budget(effort.seconds))
        if result.gap <= 1e-9:
            gaps.append(0.0)
            continue
        verdict = judge(
            case.placement, case.count, case.forward, case.input_grad, case.weight_grad, case.latency, case.memory,
            case.split, seconds=20, hint=round(result.value),
        )  # fmt: skip
        unsolved += verdict.makespan != verdict.bound
        gaps.append(result.value / max(verdict.bound, result.bound) - 1)
        if gaps[-1] > 1e-9 or result.bound > verdict.makespan:
            text = f"{seed} {case} found {result.value:g}, bound {result.bound:g}, judge {verdict.makespan}"
            yield Line(f"{text} >= {verdict.bound}", result.bound, verdict.makespan)
    mean = sum(gaps) / len(gaps)
    yield Line(
        f"{len(gaps)} instances, {unsolved} unsolved: mean gap {mean:.3%}, worst {max(gaps):.2%}, "
        f"{sum(g <= 1e-9 for g in gaps)} optimal, {time.monotonic() - began:.0f} s", mean, CLOSE,
    )  # fmt: skip


def tight(effort: Effort) -> Iterator[Line]:
    """The least makespan of a line in very little memory, proven, and what the search finds in its default time.

    The constraint program takes the micro-batches in turn at every stage and kind, which loses nothing. Take any step
    and, at each (stage, kind), give its start times to the micro-batches in ascending order. Tasks of one (stage, kind)
    are equally long, so each device runs the same intervals as before and holds as many activations at any time. And a
    dependency survives: the m-th of the later kind has m earlier ones of its kind before or with it, each of which
    follows a task of the kind it depends on, so at least m of those have ended (and their messages have arrived) by
    then; hence so has the m-th in ascending order.

    An activation lives from the start of its F to the end of its W. A device runs one task at a time, so it makes no
    difference whether it dies at W's start or W's end: the next F cannot start in between. The other readings of "4
    activations" are an activation that dies at the end of B already, and a joint backward.
    """
    line = (tuple(range(DEPTH)),)
    f, b, w = ([t] * DEPTH for t in TIMES)
    costs = CostTable.even(DEPTH, *TIMES, comm=LATENCY)
    for memory, split, freed_by, optimum in READINGS[: effort.count]:
        began = time.monotonic()
        verdict = judge(line, COUNT, f, b, w, LATENCY, memory, split, seconds=effort.seconds, freed_by=freed_by)
        spent = time.monotonic() - began
        result = search(line, COUNT, costs, memory_limit=memory, split=split, freed_by_b=float(freed_by == "B"))
        proven = verdict.makespan == verdict.bound
        status = "optimal" if proven else f"feasible, bound {verdict.bound}"
        text = (
            f"{memory} activations, {'split' if split else 'joint'} backward, alive to the end of "
            f"{freed_by if split else 'BW'}: {verdict.makespan} {status} ({spent:.0f} s); auto {result.value:g}, bound "
            f"{result.bound:g}"
        )
        yield Line(text, result.value, verdict.makespan * (1 + CLOSE))
        if result.bound > verdict.makespan or (proven and optimum not in (None, verdict.makespan)):
            yield Line(f"bound {result.bound:g}, optimum {optimum}, judge {verdict.makespan}: they disagree", 1.0)


def scarce(effort: Effort) -> Iterator[Line]:
    """The bounds by longest paths and by one device at a time, on even costs and on random small steps.

    No bound may exceed an optimum, or the order that is found.
    """
    for placement, count, times, memory, optimum in SCARCE:
        costs = CostTable.even(len(placement[0]), *times[:3], comm=times[3])
        p = build(placement, count, costs, memory_limit=memory)
        result = search(placement, count, costs, memory_limit=memory, budget=Budget(effort.seconds)).value
        before, after = lower_bound(p), one_device_bound(p, result, STATES)
        yield Line(
            f"{len(p.lanes_of)} devices, {len(placement[0])} stages, N={count}, {times}, {memory} activations: "
            f"{before:g} -> {max(before, after):g}, optimum {optimum or 'not known'}, found {result:g}",
            after, optimum or result,
        )  # fmt: skip
    gaps, spent = [], []
    for seed in range(effort.first, effort.first + effort.count):
        case = random_case(seed)
        if case.memory is None:
            continue
        result = case.search(budget=Budget(effort.seconds)).value
        p = build(case.placement, case.count, case.costs, memory_limit=case.memory, split=case.split)
        began = time.process_time()
        before, after = lower_bound(p), one_device_bound(p, result, STATES)
        spent.append(time.process_time() - began)
        gaps.append((result / before - 1, result / max(before, after) - 1))
        if after > result * (1 + 1e-9):
            yield Line(f"seed {seed}: bound {after:g} above {result:g}", after, result)
    for name, own in zip(("by longest paths", "by one device"), zip(*gaps, strict=True), strict=True):
        solved = sum(gap < 1e-9 for gap in own)
        mean = sum(own) / len(own)
        yield Line(f"{name}: {len(own)} random steps, mean gap {mean:.2%}, {solved} orders proven optimal")
    yield Line(f"{1e3 * sum(spent) / len(spent):.0f} ms for both bounds at the mean, {1e3 * max(spent):.0f} at most")
