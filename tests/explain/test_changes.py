"""The best change is what a simulation of the changed plan, made here by hand, says it gains."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from raypipe.cost.profile import LayerProfile, LinkFit, Profile, TaskTimes
from raypipe.cost.stages import frozen_stages, stage_costs
from raypipe.explain.causes import explain
from raypipe.explain.changes import Change, ExplainedPlan, better_cut, changes, costs_of_cut
from raypipe.explain.measured import Measured
from raypipe.explain.replay import Replay
from raypipe.job.parallel_spec import ParallelSpec
from raypipe.plan.online.measured_steps import as_run
from raypipe.plan.plan import Plan, build_schedule
from raypipe.schedule.costs import CostTable
from raypipe.simulate.engine import simulate
from tests.explain.simulated_steps import run_steps, uneven


def plan(cut: tuple[tuple[int, ...], ...], frozen: Collection[int] = (), **keys: object) -> Plan:
    given = {"schedule": "1f1b", "stages": len(cut), "microbatch": 4, **keys}
    return Plan.of(ParallelSpec.model_validate(given), cut, 32, frozen=frozen)


def found_for(of: Plan, costs: CostTable, batch: int = 32, **faults: object) -> list[Change]:
    schedule = as_run(build_schedule(of, batch))
    replay = Replay(Measured(schedule=schedule, steps=run_steps(schedule, costs, **faults), norm="wait"))  # type: ignore[arg-type]
    return changes(explain(replay), replay, ExplainedPlan(plan=of, batch=batch, clips=True))


def test_a_layer_too_many_on_one_stage_is_moved() -> None:
    """Layers of 1 second each: stages of 2, 4, 1, 1 become 2, 2, 2, 2, with (8 + 3) * 3 * 2 a step."""
    cut = ((0, 1), (2, 3, 4, 5), (6,), (7,))
    best = found_for(plan(cut), uneven([2, 4, 1, 1]))[0]
    assert best.mends == "imbalance"
    assert [len(stage) for stage in best.keys["cut"]] == [2, 2, 2, 2]
    assert best.predicted_step_s == pytest.approx(66.0)
    assert best.gain == pytest.approx(1 - 66.0 / simulate(build_schedule(plan(cut), 32), uneven([2, 4, 1, 1])).makespan)


def test_an_even_pipeline_is_given_smaller_micro_batches_or_a_split_backward() -> None:
    """Half the size, twice as many: (16 + 3) * 1.5 instead of (8 + 3) * 3; ZB-H1 ends after 8 * 3 + 3."""
    every = {
        change.what.partition(" ")[0]: change for change in found_for(plan(((0,), (1,), (2,), (3,))), CostTable.even(4))
    }
    assert every["micro-batches"].predicted_step_s == pytest.approx(28.5)
    assert every["schedule"].predicted_step_s == pytest.approx(27.0)


def adapters(first: int, layers: int, backward: float = 1.0) -> Profile:
    """Layers of a second for each task, the first ones of them frozen, which need forwards alone."""

    def layer(i: int) -> LayerProfile:
        back = backward if i >= first else 0.0
        times = TaskTimes(forward=1.0, input_grad=back, weight_grad=back, joint=2 * back, recompute=1.0)
        trained = 1 if i >= first else 0
        return LayerProfile(name=str(i), parameters=1, trained_parameters=trained, times={4: times}, kept_bytes=0,
                            output_bytes=0)  # fmt: skip

    free = LinkFit(alpha_s=0, beta_s_per_byte=0)
    return Profile(
        source="analytic", device="any", dtype="float32", devices=4, devices_per_host=4, memory_bytes=1e9,
        layers=tuple(map(layer, range(layers))), update_s_per_parameter=0, inside=free, between=free,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "shortest"), [("1f1b", 1.0), ("zb-h1", 1.0), ("interleaved-1f1b", 1.06)])
def test_a_model_with_frozen_layers_is_cut_by_what_is_left_of_them(name: str, shortest: float) -> None:
    """Five of nine layers have forwards alone: the best of all cuts, each with its own schedule. The profile says half
    of what a backward takes, and no more of the first stage's than that it has none."""
    first, layers, stages, chunks = 5, 9, 4, 2 if name == "interleaved-1f1b" else 1
    truth, stages = adapters(first, layers), 4 // chunks * chunks
    keys = {"schedule": name, "stages": stages // chunks, "chunks": chunks}

    def made(cut: Sequence[Sequence[int]]) -> tuple[Plan, CostTable]:
        of = plan(tuple(map(tuple, cut)), frozen_stages(truth, tuple(cut)), **keys)
        row = tuple(s % (stages // chunks) for s in range(stages))
        return of, stage_costs(truth, tuple(cut), 4, (row,), split=name == "zb-h1")

    def seconds(cut: Sequence[Sequence[int]]) -> float:
        of, costs = made(cut)
        return simulate(build_schedule(of, 32), costs).makespan

    present = [range(2), range(2, 4), range(4, 6), range(6, 9)]
    of, costs = made(present)
    replay = Replay(Measured(schedule=as_run(build_schedule(of, 32)), norm="wait",
                             steps=run_steps(as_run(build_schedule(of, 32)), costs)))  # fmt: skip
    planned = ExplainedPlan(
        plan=of, batch=32, clips=True, layer_s=(1.0,) * layers, profile=adapters(first, layers, 0.5)
    )
    result = {change.mends: change for change in changes(explain(replay), replay, planned) if "cut" in change.keys}
    every = {
        edges: seconds([range(a, b) for a, b in pairwise((0, *edges, layers))])
        for edges in combinations(range(1, layers), stages - 1)
    }
    best = result["imbalance"]
    assert best.predicted_step_s == pytest.approx(seconds(best.keys["cut"]))
    assert best.predicted_step_s <= shortest * min(every.values())  # borders are moved one by one
    changed = of.model_copy(update={"program": of.program, **best.keys})  # as somebody would edit plan.json
    assert build_schedule(changed, 32) == build_schedule(made(best.keys["cut"])[0], 32)
    assert best.predicted_step_s < seconds(present) == every[2, 4, 6]
    without = changes(explain(replay), replay, replace(planned, profile=None))
    assert not [change for change in without if "cut" in change.keys]


def test_late_data_are_the_first_thing_to_change_where_they_cost_most() -> None:
    from raypipe.plan.online.recorded_steps import StepWaits

    waits = StepWaits(data_s=(30.0, 0.0, 0.0, 0.0))
    best = found_for(
        plan(((0,), (1,), (2,), (3,))), CostTable.even(4), waits=waits, slower=lambda _, i: 31.0 if i == 0 else 1.0
    )[0]  # fmt: skip
    assert (best.mends, best.predicted_step_s) == ("data", pytest.approx(33.0))


def test_a_step_that_loses_nothing_has_no_better_plan() -> None:
    assert found_for(plan(((0, 1),)), CostTable.even(1)) == []


def test_without_a_plan_only_causes_are_mended() -> None:
    of = plan(((0,), (1,), (2,), (3,)))
    schedule = as_run(build_schedule(of, 32))
    replay = Replay(Measured(schedule=schedule, steps=run_steps(schedule, CostTable.even(4), gap=9.0), norm="wait"))
    assert [change.mends for change in changes(explain(replay), replay, None)] == ["host"]


def test_costs_of_another_cut_move_with_its_layers() -> None:
    costs = uneven([3.0, 1.0])
    moved = costs_of_cut(costs, ((0, 1, 2), (3,)), ((0, 1), (2, 3)), [1 / 3] * 3 + [1.0], [1.0, 1.0])
    assert moved.forward == pytest.approx((2.0, 2.0))
    slower = costs_of_cut(costs, ((0, 1, 2), (3,)), ((0, 1), (2, 3)), [1 / 3] * 3 + [1.0], [1.0, 2.0])
    assert slower.forward == pytest.approx((2.0, 2.0 * (1.0 + 0.5)))


def test_the_better_cut_is_the_best_of_all_small_ones() -> None:
    layers = [1.0, 2.0, 1.0, 4.0, 1.0, 1.0]

    def slowest(cut: tuple[tuple[int, ...], ...]) -> float:
        return max(sum(layers[i] for i in stage) for stage in cut)

    best, seconds = better_cut(((0,), (1,), (2, 3, 4, 5)), layers, ((0, 1, 2),), slowest)
    every = [
        (tuple(range(a)), tuple(range(a, b)), tuple(range(b, 6))) for a in range(1, 5) for b in range(a + 1, 6)
    ]  # fmt: skip
    assert seconds == min(map(slowest, every)) == slowest(best)
