"""The search's promises: any placement and rule, the memory kept, the clock kept, honest figures."""

import itertools
import random
import time

import pytest

from raypipe.errors import ScheduleError
from raypipe.schedule import SCHEDULES, Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Rules, StageGraph
from raypipe.schedule.live_activations import peak_activations
from raypipe.schedule.verify import verify
from raypipe.search import search
from raypipe.search.budget import Budget
from raypipe.search.order_bounds import lower_bound
from raypipe.search.placements import placed
from raypipe.search.problem import build
from raypipe.search.search import search_recompute
from raypipe.simulate import lower_bound as bounds
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import period
from tests.bench.search.zero_bubble_heuristic import shortest
from tests.exhaustive import crossed


@pytest.mark.parametrize("seed", range(100, 130))
def test_what_is_found_is_a_step_within_its_memory(make_case, seed):
    case = make_case(seed)
    result = case.search(budget_s=0.1)
    verify(result.schedule, case.memory)
    timeline = simulate(result.schedule, case.costs)
    assert timeline.makespan == pytest.approx(result.makespan)
    assert result.bound <= result.value * (1 + 1e-9)
    kinds = {task.kind for task in result.schedule.tasks()}
    assert kinds == ({"F", "B", "W"} if case.split else {"F", "BW"})


@pytest.mark.slow
def test_a_graph_that_is_no_chain():
    """An encoder feeds every decoder stage, placed on three devices."""
    graph = StageGraph(5, ((0, 1), (1, 2), (0, 3), (2, 3), (1, 4), (3, 4)))
    costs = CostTable.even(5, 3, 4, 2, comm=1)
    result = search(((0, 1, 2, 1, 0),), 5, costs, graph=graph, memory_limit=4, budget_s=0.5)
    verify(result.schedule, 4)
    assert result.schedule.graph == graph
    assert simulate(result.schedule, costs).makespan == pytest.approx(result.makespan)


@pytest.mark.parametrize("rules", [Rules(skip_first_b=True), Rules(w_dep="grad"), Rules(recompute="late")])
@pytest.mark.parametrize("split", [True, False])
def test_other_rules(rules, split):
    costs = CostTable.even(4, 2, 3, 2, recompute=2, comm=1)
    recompute = (0, 1) if rules.recompute == "late" else ()
    result = search(
        ((0, 1, 2, 3),), 6, costs, rules=rules, split=split, recompute=recompute, memory_limit=4, budget_s=0.3
    )  # fmt: skip
    verify(result.schedule, 4)
    assert simulate(result.schedule, costs).makespan == pytest.approx(result.makespan)
    assert {t.stage for t in result.schedule.tasks() if t.kind == "R"} == set(recompute)


@pytest.mark.slow
def test_a_share_that_dies_with_b():
    """If B frees most of an activation, a forward fits in before the W, and the step is shorter."""
    costs = CostTable.even(4, 10, 12, 8, comm=1)
    whole = search(((0, 1, 2, 3),), 12, costs, memory_limit=3.25, budget=Budget(1.0))
    half = search(((0, 1, 2, 3),), 12, costs, memory_limit=3.25, freed_by_b=0.75, budget=Budget(1.0))
    assert max(peak_activations(whole.schedule)) <= 3
    assert half.makespan < whole.makespan
    for order in half.schedule.orders:
        live = 0.0
        for task in order:
            live += task.kind == "F"
            assert live <= 3.25
            live -= {"F": 0, "B": 0.75, "W": 0.25}[task.kind]


def test_memory_may_differ_by_device():
    costs = CostTable.even(4, 10, 12, 8, comm=1)
    result = search(((0, 1, 2, 3),), 10, costs, memory_limit=(5, 3, 2, 1), budget_s=0.5)
    assert all(a <= b for a, b in zip(peak_activations(result.schedule), (5, 3, 2, 1), strict=True))


@pytest.mark.parametrize("objective", ["span", "period"])
def test_span_and_period(objective):
    """Twice 1F1B's memory is enough for no bubble at all in either (PAPERS, "checked")."""
    costs = CostTable.even(4)
    result = search(((0, 1, 2, 3),), 12, costs, memory_limit=7, objective=objective, budget=Budget(2.0))
    timeline = simulate(result.schedule, costs)
    value = max(timeline.device_spans) if objective == "span" else period(result.schedule, costs)
    assert result.value == pytest.approx(value)
    assert result.value == result.bound == 36


def test_never_longer_than_where_it_started():
    costs = CostTable.even(6, 10, 12, 8, comm=1)
    known = generate("zb-h1", Shape(devices=6, microbatches=9), costs)
    result = search(((0, 1, 2, 3, 4, 5),), 9, costs, memory_limit=6, budget_s=0.05, starts=[known])
    assert result.makespan <= simulate(known, costs).makespan


def test_the_clock_is_kept():
    """A hard case with a short budget ends in time; one list schedule and a move may still be under way.

    Told by this thread's processor time, which is no more than what the clock says however busy the machine is.
    """
    began = time.thread_time()
    result = search((tuple(range(8)),), 32, CostTable.even(8, 10, 12, 8, comm=1), memory_limit=4, budget_s=0.3)
    assert result.gap > 0
    assert time.thread_time() - began < 1.5


def test_more_time_is_no_worse(make_case):
    case = make_case(7)
    assert case.search(budget=Budget(0.6)).value <= case.search(budget=Budget(0.02)).value


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_holds_and_is_no_weaker_than_the_general_one(make_case, seed):
    case = make_case(seed)
    result = case.search(budget_s=0.05)
    free = lower_bound(build(case.placement, case.count, case.costs, split=case.split))
    tight = lower_bound(
        build(case.placement, case.count, case.costs, split=case.split, memory_limit=case.memory)
    )  # fmt: skip
    general = bounds.lower_bound(result.schedule, case.costs)
    assert general <= free + 1e-9
    assert free <= tight + 1e-9
    assert tight <= result.value * (1 + 1e-9)


def test_no_micro_batch_for_the_second_replica():
    result = search(((0, 1), (1, 0)), 1, CostTable.even(2), budget_s=0.2)
    verify(result.schedule)
    assert result.makespan == result.bound == 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"objective": "makspan"}, 'did you mean "makespan"'),
        ({"memory_limit": 0.5}, "one micro-batch on device 0 needs 1"),
        ({"memory_limit": (1, 1)}, "2 values for 3 devices"),
        ({"costs": CostTable.even(2)}, "2 values for 3 stages"),
    ],
)
def test_wrong_requests(change, said):
    request = {"placement": ((0, 1, 2),), "microbatches": 2, "costs": CostTable.even(3), **change}
    with pytest.raises(ScheduleError, match=said):
        search(**request)


def test_placements_refuse_what_they_have_no_use_for():
    for name, shape, said in [
        ("vee", Shape(devices=2, microbatches=2), "unknown"),
        ("line", Shape(devices=2, microbatches=2, chunks=2), "chunks"),
        ("ring", Shape(devices=2, microbatches=2, pipelines=4), "pipelines"),
        ("bidirectional", Shape(devices=3, microbatches=2), "even number"),
    ]:
        with pytest.raises(ScheduleError, match=said):
            placed(name, shape)


def test_the_same_seed_tries_the_same_order_of_things():
    """Up to the clock: with a goal that is reached, two searches end in the same order."""
    costs = CostTable.even(4, 10, 12, 8, comm=1)
    two = [search(((0, 1, 2, 3),), 9, costs, memory_limit=4, seed=3, budget=Budget(5.0)) for _ in range(2)]
    assert two[0].gap == 0
    assert two[0].schedule == two[1].schedule


def test_random_is_not_needed_globally():
    state = random.getstate()
    search(((0, 1),), 3, CostTable.even(2, 1, 2, 3), memory_limit=1, budget_s=0.05)
    assert random.getstate() == state


@pytest.mark.parametrize("times", [(0, 0, 0), (1, 0, 0), (0, 1, 0)])
@pytest.mark.parametrize("name", ["line", "v", "bidirectional"])
def test_tasks_that_take_no_time(name, times):
    shape = Shape(devices=2, microbatches=3, chunks=2 if name == "v" else 1)
    placement = placed(name, shape)
    costs = CostTable.even(len(placement[0]), *times)
    result = search(placement, 3, costs, memory_limit=2, budget_s=0.1)
    verify(result.schedule, 2)
    assert simulate(result.schedule, costs).makespan == result.makespan >= result.bound


# The search never ends with a longer order than a named schedule of the same placement and memory.


NAMES = sorted(set(SCHEDULES) - {"dapple", "pipedream", "pipedream-2bw"})
"""Of steps with one version of the weights, each once."""


def shape_of(name, rng):
    options = SCHEDULES[name].options
    depth = 2 * rng.randint(1, 3) if "chimera" in name or name in ("gems", "dualpipe") else rng.randint(2, 6)
    return Shape(
        devices=depth,
        microbatches=2 * depth if SCHEDULES[name].paired else rng.randint(max(2, depth // 2), 2 * depth),
        chunks=rng.randint(1, 2) if "chunks" in options else 1,
        memory_limit=depth + 1 if "memory_limit" in options and rng.random() < 0.5 else None,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "objective"), crossed(NAMES, ["makespan", "span", "period"]))
def test_no_named_schedule_is_shorter(name, objective):
    """Hardly any time to search: what is found is mostly what the search began with."""
    rng = random.Random(f"{name} {objective}")
    for _ in range(2):
        shape = shape_of(name, rng)
        stages = stages_of(name, shape)
        times = [tuple(float(rng.randint(1, 12)) for _ in range(stages)) for _ in range(4)]
        costs = CostTable(
            forward=times[0], input_grad=times[1], weight_grad=times[2], recompute=times[3],
            comm=float(rng.randint(0, 4)),
        )  # fmt: skip
        named = generate(name, shape, costs)
        timeline = simulate(named, costs)
        result = search(
            named.placement, shape.microbatches, costs, memory_limit=max(timeline.peak_activations), rules=named.rules,
            recompute={t.stage for t in named.tasks() if t.kind == "R"}, objective=objective, budget_s=0.02,
        )  # fmt: skip
        assert max(peak_activations(result.schedule)) <= max(timeline.peak_activations)
        length = {"makespan": timeline.makespan, "span": max(timeline.device_spans)}.get(objective)
        assert result.value <= (period(named, costs) if length is None else length) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["1f1b", "early-recompute", "shifted-critical-path"])
@pytest.mark.parametrize("limit", [None, 2])
def test_nor_where_the_search_chooses_what_recomputes(name, limit):
    """More stages than it has time to try one by one."""
    rng = random.Random(name)
    shape = Shape(devices=7, microbatches=9)
    times = [tuple(float(rng.randint(1, 12)) for _ in range(7)) for _ in range(3)]
    costs = CostTable(forward=times[0], input_grad=times[1], weight_grad=times[2], recompute=times[0], comm=1.0)
    named = generate(name, shape, costs)
    held = max(peak_activations(named)) * (limit or 1)
    result = search_recompute(named.placement, 9, costs, memory_limit=held, budget_s=0.05)
    assert result.value <= simulate(named, costs).makespan


@pytest.mark.parametrize("seed", range(20))
def test_nor_is_the_zero_bubble_heuristic(seed):
    """Very uneven lines, in 1F1B's memory and others; the heuristic as the benchmarks have it, from its description."""
    rng = random.Random(seed)
    depth = rng.randint(2, 9)
    count, memory = rng.randint(1, 2 * depth), rng.choice((depth, depth, rng.randint(1, 2 * depth)))
    times = [tuple(t * rng.uniform(1, 4) for _ in range(depth)) for t in (10, 12, 8)]
    costs = CostTable(
        forward=times[0], input_grad=times[1], weight_grad=times[2],
        comm=tuple(rng.uniform(0, 5) for _ in range(depth)),
    )  # fmt: skip
    result = search((tuple(range(depth)),), count, costs, memory_limit=memory, budget_s=0.02)
    verify(result.schedule, memory)
    assert result.value <= shortest(depth, count, costs, memory) * (1 + 1e-9)


# The choice of stages that recompute.


@pytest.mark.parametrize(("depth", "count"), [(3, 6), (4, 8), (6, 9)])
def test_merak_is_found(depth, count):
    """F = R = 1, BW = 2: the shifted critical path, 4N + 3(D - 2), with one activation a device."""
    costs = CostTable.even(depth, recompute=1)
    result = search_recompute((tuple(range(depth)),), count, costs, memory_limit=1, split=False)
    verify(result.schedule, 1)
    assert result.value == 4 * count + 3 * (depth - 2)
    assert depth - 1 not in {t.stage for t in result.schedule.tasks() if t.kind == "R"}


def test_with_memory_enough_nothing_is_recomputed():
    result = search_recompute(((0, 1, 2),), 6, CostTable.even(3, recompute=1), memory_limit=3)
    assert {t.kind for t in result.schedule.tasks()} == {"F", "B", "W"}
    assert result.gap == 0


@pytest.mark.slow
def test_against_every_choice_of_stages():
    """Three uneven stages in two activations: no choice of stages, each searched on its own, is shorter."""
    costs = CostTable(forward=(3, 2, 4), input_grad=(3, 4, 3), weight_grad=(2, 3, 2), recompute=(3, 2, 4), comm=1)
    result = search_recompute(((0, 1, 2),), 6, costs, memory_limit=2, budget_s=3)
    verify(result.schedule, 2)
    assert max(peak_activations(result.schedule)) <= 2
    every = [
        search(((0, 1, 2),), 6, costs, memory_limit=2, recompute=chosen, budget_s=0.3).value
        for size in range(4)
        for chosen in itertools.combinations(range(3), size)
    ]
    assert result.value <= min(every)
    assert result.bound <= min(every)
