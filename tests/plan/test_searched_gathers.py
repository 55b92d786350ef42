"""Gather positions of plans: never slower than once a step or once a micro-batch, and run as they were found."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raypipe.cost.profile import LinkFit
from raypipe.errors import ScheduleError, SpecError
from raypipe.plan.candidate import Candidate
from raypipe.plan.choose import choose, plan_of
from raypipe.plan.plan import Plan, build_schedule, less_memory
from raypipe.plan.predict.of_plan import PlanPredictor
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.searched import better_gathers
from raypipe.schedule import Shape, generate
from raypipe.schedule.forms.text import to_text
from raypipe.schedule.ir import Schedule
from raypipe.schedule.passes import replicate, shard
from raypipe.schedule.shape import Grid
from raypipe.train import make_plan
from tests.exhaustive import exhaustive
from tests.plan.conftest import MIB, make_job, make_profile
from tests.plan.sharded_step import seconds_of_one_copy

LAYERS = 8
ENDS = ("step", "microbatch")


def shapes(count: int, seed: int) -> Iterator[tuple[Any, Predictor, Candidate]]:
    """Random jobs, their judges, and candidates of level 3: slow links and fast ones, little memory and enough."""
    rng = random.Random(seed)
    result = 0
    while result < count:
        link = LinkFit(alpha_s=2e-4, beta_s_per_byte=rng.choice([1, 5, 20]) / 1e9)
        stages, chunks = rng.choice([(1, 4), (2, 2), (2, 3), (1, 6), (2, 4)])
        name = rng.choice(["interleaved-1f1b", "bfs", "zeropp"] if stages > 1 else ["interleaved-1f1b", "bfs"])
        replicas, each = rng.choice([2, 4]), rng.choice([2, 4, 6])
        unit = {"unit": rng.choice([each, each // 2])} if name == "zeropp" else {}
        profile = make_profile(
            layers=LAYERS, devices=stages * replicas, seed=rng.randrange(99), between=link, inside=link,
            memory_bytes=rng.uniform(150, 900) * MIB,
        )  # fmt: skip
        job = make_job(layers=LAYERS, batch=replicas * each, clip=1.0)
        judge = Predictor(profile, job.train, LAYERS)
        grid = Grid(stages, replicas, 1, each)
        c = replace(Candidate.on(grid, name, chunks=chunks, update="wait", **unit), shard="zero3")
        try:
            fits = any(judge.predict(replace(c, gather=gather)).fits for gather in ("unit", *ENDS))
        except ScheduleError:  # there is no such shape
            continue
        if fits:
            result += 1
            yield job, judge, c


def policies_that_fit(judge: Predictor, c: Candidate) -> list[Prediction]:
    """With one gather every micro-batch first."""
    result = [judge.predict(replace(c, gather=gather)) for gather in ("microbatch", "unit", "step")]
    return [judge.time(p, final=True) for p in result if p.fits]


def first_that_fits(judge: Predictor, c: Candidate) -> Prediction:
    return policies_that_fit(judge, c)[0]


def as_built(p: Prediction, job: Any) -> Schedule:
    """What the runtime makes of the plan: all copies, of which one is returned."""
    plan = Plan.model_validate_json(plan_of(p, job).text())
    whole = build_schedule(plan, job.train.batch)
    devices, copies = p.candidate.stages, p.candidate.replicas
    sharding = whole.sharding
    assert sharding is not None
    one = whole.with_orders(
        whole.orders[:devices], placement=whole.placement[: whole.replicas // copies],
        microbatches=whole.microbatches // copies, sharding=replace(sharding, copies=1),
    )  # fmt: skip
    assert replicate(one, copies).orders == whole.orders
    return one


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *exhaustive(2, 3)])
def test_never_slower_than_both_ends(seed: int) -> None:
    """By the prediction, and by a clock of the test's own, on the schedule that the runtime builds from the plan."""
    searched = 0
    for job, judge, c in shapes(12, seed):
        result = better_gathers(judge, first_that_fits(judge, c), 1.0)
        assert result.fits
        seconds = seconds_of_one_copy(as_built(result, job), result.costs)
        for gather in ENDS:
            end = judge.predict(replace(c, gather=gather))
            if end.fits:
                assert result.step_s <= end.step_s * (1 + 1e-9)
                of_end = seconds_of_one_copy(as_built(judge.time(end, final=True), job), end.costs)
                assert seconds <= of_end * (1 + 1e-9)
        if result.candidate.gather == "order":
            searched += 1
            assert result.order is not None
            update = max(sum(result.costs.update[s] for s in own) for own in _stages_of(result.order))
            norm_s = judge.overheads(result.candidate).norm_s
            assert seconds + norm_s + update == pytest.approx(result.step_s)
            assert PlanPredictor(job, judge.profile).time(plan_of(result, job)).step == pytest.approx(result.step_s)
    assert searched >= 3


def _stages_of(schedule: Schedule) -> list[list[int]]:
    return [
        [s for row in schedule.placement for s, home in enumerate(row) if home == d] for d in range(schedule.devices)
    ]


def slow_link(**changes: Any) -> Any:
    link = LinkFit(alpha_s=2e-4, beta_s_per_byte=5 / 1e9)
    return make_profile(layers=LAYERS, devices=8, between=link, inside=link, **changes)


def searched_plan() -> tuple[Any, Any, Plan]:
    """A job, its profile, and a plan of ZeroPP with gathers of its own."""
    job, profile = make_job(layers=LAYERS, batch=16, clip=1.0), slow_link(memory_bytes=600 * MIB)
    judge = Predictor(profile, job.train, LAYERS)
    c = Candidate.on(Grid(2, 4, 1, 4), "zeropp", chunks=3, unit=2, update="wait")
    result = better_gathers(judge, judge.predict(replace(c, shard="zero3", gather="microbatch")), 1.0)
    assert result.candidate.gather == "order"
    return job, profile, plan_of(result, job)


@pytest.mark.slow
def test_the_planner_chooses_positions_where_they_are_faster() -> None:
    asked = {"auto": True, "schedule": "zeropp", "stages": 2, "replicas": 4, "shard": "zero3", "chunks": 3, "unit": 2}
    job, profile = make_job(layers=LAYERS, batch=16, clip=1.0, parallel=asked), slow_link(memory_bytes=600 * MIB)
    by_policy = choose(job, profile, search_s=0).best
    decision = choose(job, profile, search_s=1)
    assert decision.best.candidate.gather == "order"
    assert decision.best.step_s < by_policy.step_s
    assert decision.best.fits
    assert decision.plan.parallel.schedule == "zeropp"
    assert {t.kind for t in build_schedule(decision.plan, 16).tasks()} >= {"AG", "RS", "FREE"}
    given = make_job(layers=LAYERS, batch=16, clip=1.0, parallel={**asked, "gather": "microbatch"})
    assert choose(given, profile, search_s=1).best.candidate.gather == "microbatch"


@pytest.mark.slow
def test_what_a_plan_with_gathers_of_its_own_refuses() -> None:
    job, _, plan = searched_plan()

    def refused(**changes: Any) -> str:
        with pytest.raises(ScheduleError) as caught:
            plan.remade(job.train.batch, **changes)
        return str(caught.value)

    assert "has gathers of its own, the job asks for one per unit" in refused(gather="unit")
    assert "divides zero3, the job zero2" in refused(shard="zero2")
    assert "shard groups of all copies, the job of 2" in refused(shard_replicas=2)
    assert "no R tasks can be added" in refused(recompute="full")
    with pytest.raises(ScheduleError, match="the schedule's order has no gathers"):
        Plan.of(plan.parallel, plan.cut, job.train.batch)
    lost = plan.program.replace(" 0AG", "", 1)
    with pytest.raises(ScheduleError, match="sharded here"):
        build_schedule(plan.model_copy(update={"program": lost}), job.train.batch)


def test_a_schedule_file_may_have_gathers_of_its_own(tmp_path: Path) -> None:
    order = generate("zeropp", Shape(devices=2, microbatches=4, chunks=2, unit=2))
    file = tmp_path / "own.txt"
    file.write_text(to_text(shard(order, 3, gather="step", ahead=2)))
    keys = {"schedule": str(file), "stages": 2, "replicas": 2, "microbatch": 1, "shard": "zero3"}
    job = make_job(batch=8, parallel={**keys, "gather": "order"})
    built = build_schedule(make_plan(job), 8)
    assert built.sharding is not None
    assert [t for t in built.orders[0] if t.kind != "U"] == list(shard(order, 3, gather="step", ahead=2).orders[0])
    with pytest.raises(SpecError, match="has gathers of its own, the job asks for one per unit"):
        make_job(batch=8, parallel=keys)
    alone = make_job(batch=4, parallel={**keys, "gather": "order", "replicas": 1})  # nobody to divide with
    assert build_schedule(make_plan(alone), 4).sharding is None


@pytest.mark.slow
def test_a_plan_that_ran_out_of_memory_gives_up_its_own_gathers_first() -> None:
    job, _, plan = searched_plan()
    result = less_memory(job, plan)
    assert result is not None
    smaller, words = result
    assert words == "gathers every micro-batch instead of the plan's own"
    schedules = [build_schedule(each, job.train.batch) for each in (plan, smaller)]
    gathers = [sum(t.kind == "AG" for t in s.tasks()) for s in schedules]
    assert gathers[0] < gathers[1]
    again = less_memory(job, smaller)
    assert again is not None
    assert "recompute: full" in again[1]
