"""List schedules do what they say: no device idles or starts a task while a better one could run."""

import random
from itertools import pairwise
from math import inf

import pytest

from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Rules
from raypipe.schedule.verify import verify
from raypipe.search.list_scheduling import LaneArrays, Listed, Setting, list_schedule
from raypipe.search.order_walk import times
from raypipe.search.priorities import portfolio, shaken
from raypipe.search.problem import Problem, build
from tests.search.test_due_dates import uneven


def recomputing(seed: int) -> Problem:
    """Stages that recompute, are frozen or take no time, among others."""
    rng = random.Random(seed)
    row = (*(rng.randrange(3) for _ in range(5)), 0, 1, 2)
    times = [tuple(rng.choice((0.0, 1.0, 2.0, 3.5)) for _ in row) for _ in range(3)]
    costs = CostTable(
        forward=times[0], input_grad=times[1], weight_grad=times[2], recompute=times[0], comm=rng.choice((0.0, 0.5)),
    )  # fmt: skip
    dropped = tuple(s for s in range(2, len(row)) if rng.random() < 0.3)
    frozen = Rules(frozen=rng.choice(((), (0,), (0, 1))))
    return build((row,), 6, costs, memory_limit=6, recompute=dropped, rules=frozen, split=rng.random() < 0.7)


def problems(make_case, seed):
    case = make_case(seed)
    yield build(case.placement, case.count, case.costs, memory_limit=case.memory, split=case.split)
    yield recomputing(seed)
    yield uneven(seed)


def passed_over(p: Problem, setting: Setting, listed: Listed) -> int:
    """Count the ready tasks for which a device had room while it idled or ran one of lower priority.

    Times follow from the orders alone; the schedule's own ends must be the same.
    """
    begin, end, _ = times(LaneArrays.of(p), listed.orders)
    assert listed.ends == pytest.approx([end[order[-1]] for order in listed.orders], rel=1e-12)
    count = 0
    for order in listed.orders:
        done, live, now = [0] * len(p.kind), 0.0, 0.0
        for t in order:
            chosen, m = p.lane[t], t - p.base[p.lane[t]]
            start = begin[t]
            for c in {p.lane[other] for other in order}:
                if c == chosen or done[c] == p.count[c] or live + p.takes[c] > p.cap[p.device[c]] + 1e-9:
                    continue
                before = (end[p.base[e] + done[c]] + lag for e, lag in p.before[c])
                early = max(before, default=0.0) < start - 1e-9  # what arrives at the same moment may come too late
                first = setting.key[c] + setting.pace * done[c] < setting.key[chosen] + setting.pace * m
                count += early and (first or now < start - 1e-9)
            done[chosen] += 1
            live += p.takes[chosen] - p.frees[chosen]
            now = end[t]
    return count


@pytest.mark.parametrize("seed", range(8))
def test_the_task_of_highest_priority_runs_first(make_case, seed) -> None:
    """Without patience, limits of how far forwards run ahead, and reserves, nothing else is ever a reason to wait."""
    ran = 0
    for p in problems(make_case, seed):
        layout = LaneArrays.of(p)
        settings = [s for s in portfolio(p) if not s.ahead][::7]
        for setting in settings:
            plain = Setting(setting.key, setting.pace, reserve="none")
            if listed := list_schedule(layout, plain):
                ran += 1
                assert passed_over(p, plain, listed) == 0
    assert ran > 5


@pytest.mark.parametrize("seed", range(8))
def test_any_setting_keeps_dependencies_memory_and_its_lead(make_case, seed) -> None:
    rng = random.Random(seed)
    for p in problems(make_case, seed):
        layout = LaneArrays.of(p)
        settings = list(portfolio(p))
        for setting in rng.sample(settings, 4) + [s for s in settings if s.reserve == "safe"][:1]:
            changed = shaken(p, setting, rng)
            listed = list_schedule(layout, changed)
            if listed is None:
                assert min(p.cap) < inf
                continue
            verify(p.schedule(listed.orders))
            assert p.fits(listed.orders)
            for order in listed.orders:
                for c in {p.lane[t] for t in order if p.kind[p.lane[t]] == "F" and p.takes[p.lane[t]]}:
                    assert leads(p, order, c) <= (changed.ahead[c] if changed.ahead else inf)


def leads(p: Problem, order: list[int], forward: int) -> int:
    """Return how many forwards of a lane run ahead of the gradients that its stage has, at most."""
    own = [c for c in range(len(p.kind)) if (p.stage[c], p.replica[c]) == (p.stage[forward], p.replica[forward])]
    ending = [c for c in own if p.kind[c] in ("B", "BW")] or [c for c in own if p.kind[c] == "W"]
    if not ending:
        return 0
    ahead = most = 0
    for t in order:
        ahead += (p.lane[t] == forward) - (p.lane[t] == ending[0])
        most = max(most, ahead)
    return most


def test_patience_waits_for_a_better_task_that_is_about_to_arrive() -> None:
    """One device of two: a W of 4 is ready, the next B arrives within 1."""
    costs = CostTable.even(2, forward=1, input_grad=2, weight_grad=4)
    p = build(((0, 1),), 3, costs)
    key = tuple({"B": 0.0, "F": 1.0, "W": 2.0}[kind] for kind in p.kind)
    begins = {}
    for patience in (0.0, 3.0):
        listed = list_schedule(LaneArrays.of(p), Setting(key, patience=(patience,) * len(key), reserve="none"))
        assert listed is not None
        begins[patience] = [p.kind[p.lane[t]] for t in listed.orders[0]]
    first_gradients = {patience: kinds.index("W") for patience, kinds in begins.items()}
    assert first_gradients[3.0] > first_gradients[0.0]
    assert all(a != b or a == "F" for a, b in pairwise(begins[0.0][:6]))
