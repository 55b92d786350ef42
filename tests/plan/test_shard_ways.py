"""What copies divide, as the planner searches it: against timing every way, and against plans without shards."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from raypipe.errors import ScheduleError, SpecError
from raypipe.launch.plans import with_plan
from raypipe.plan.best_first import best_first
from raypipe.plan.candidate import Candidate
from raypipe.plan.choose import choose, plan_of
from raypipe.plan.decision_json import as_json
from raypipe.plan.plan import build_schedule
from raypipe.plan.predict.of_plan import PlanPredictor
from raypipe.plan.predict.orders import Order
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.predict.step_time import step_time
from raypipe.schedule.ir import Sharding
from raypipe.schedule.passes import add_updates, place_gradient_sync, replicate, shard
from raypipe.schedule.shape import Grid
from raypipe.simulate.engine import simulate
from tests.exhaustive import exhaustive
from tests.plan.conftest import MIB, make_job, make_profile
from tests.plan.test_best_first import flushing, setting

TIGHT = {"layers": 6, "devices": 4, "batch": 8, "seed": 5}


@pytest.mark.slow
@pytest.mark.parametrize("mib", [330, *exhaustive(1000, 450)])
def test_shards_are_never_slower_and_help_where_memory_is_short(mib: int) -> None:
    judge, every = setting(**TIGHT, memory_bytes=mib * MIB, divides=True)
    alone, _ = setting(**TIGHT, memory_bytes=mib * MIB)
    result, without = best_first(judge, every, 1, flushing).best, best_first(alone, every, 1, flushing).best
    assert result[0].step_s <= without[0].step_s * (1 + 1e-6)
    assert result[0].fits
    if mib == 330:
        assert result[0].candidate.shard != "none"
        assert result[0].step_s < without[0].step_s * 0.99


@pytest.mark.slow
@pytest.mark.parametrize("train", [{"clip": 1.0}, {"optimizer": "muon"}, *exhaustive({"clip": None})])
def test_no_way_that_fits_is_faster(train: dict[str, Any]) -> None:
    """Every plan without recomputation, with every way to divide it, timed."""
    judge, every = setting(**TIGHT, memory_bytes=420 * MIB, divides=True, **train)
    result = best_first(judge, every, 1, flushing).best[0]
    for grid in every:
        for made in judge.of(grid).on(grid):
            for c in (made, *(judge.of(made).shard_ways(made) if made.shard == "none" else ())):
                if flushing(c) is not None:
                    with suppress(ScheduleError):
                        p = judge.of(c).predict(c)
                        assert judge.of(c).least(c) <= p.step_s * (1 + 1e-9)
                        assert not p.fits or p.step_s >= result.step_s * (1 - 1e-6), c


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("way", [("zero1", None), ("zero2", None), ("zero3", None), ("zero3", 2)])
def test_one_copy_stands_for_all(way: tuple[str, int | None], clip: float | None) -> None:
    """The step of all four copies, simulated as the runtime builds it, takes as long as that of the one predicted."""
    job, profile = make_job(batch=32, clip=clip), make_profile(devices=8)
    judge = Predictor(profile, job.train, 6)
    plain = Candidate.on(Grid(2, 4, 1, 8), "zeropp", chunks=2, unit=4, update="wait")
    c = replace(plain, shard=way[0], shard_replicas=way[1])
    p = judge.predict(c)
    one = judge._orders.of(replace(c, shard="none"), 8).schedule
    level = int(way[0][-1])
    every = shard(replicate(one, 4), level, unit=4, copies=4, group=way[1])
    assert every.sharding == Sharding(levels=(level,) * 4, copies=4, group=way[1])
    alone = Order(shard(one, level, unit=4, group=way[1]))
    assert step_time(alone, p.costs, "eager", judge.overheads(c)).step == pytest.approx(p.step_s)
    if clip is not None:  # a step is over when the last update is: nothing runs into the next one
        whole = alone.whole("lazy", 4).schedule
        all_copies = add_updates(place_gradient_sync(every, "lazy"))
        quiet = replace(p.costs, update=(0.0,) * 4)
        assert simulate(all_copies, quiet).makespan == pytest.approx(simulate(whole, quiet).makespan)


@pytest.mark.slow
def test_the_plan_is_what_was_predicted() -> None:
    job, profile = make_job(batch=16), make_profile(memory_bytes=330 * MIB)
    decision = choose(job, profile, search_s=0)
    best = decision.best.candidate
    assert best.shard != "none"
    parallel = decision.plan.parallel
    assert (parallel.shard, parallel.gather, parallel.shard_replicas) == (best.shard, best.gather, best.shard_replicas)
    schedule = build_schedule(decision.plan, 16)
    assert schedule.sharding is not None
    assert {t.kind for t in schedule.tasks()} >= {"AG", "RS"}
    if decision.best.recomputed is None and decision.best.keep is None:
        assert PlanPredictor(job, profile).time(decision.plan).step == pytest.approx(decision.best.step_s)
    row = as_json(decision)["candidates"][0]
    assert row["shard"] == best.shard
    assert row["gather_s"] > 0 < row["reduce_scatter_s"]
    assert as_json(decision)["best"]["parallel"]["shard"] == best.shard


@pytest.mark.slow
def test_what_is_predicted_can_run() -> None:
    """With an odd number of micro-batches the directions of a Chimera gather unequally often; their gathers and
    gradient sums do not wait for each other all the same."""
    job = make_job(batch=12, clip=1.0)
    judge = Predictor(
        make_profile(devices=8, devices_per_host=4), job.train, 6, syncs=("lazy", "eager", "eager-opt"),
        asked={"shard": "zero3"}, divides=True,
    )  # fmt: skip
    ran = 0
    for c in judge.on(Grid(2, 4, 1, 3)):
        if c.form.versions == "flush":
            try:
                p = judge.predict(c)
            except ScheduleError:
                assert c.schedule != "chimera"
                continue
            build_schedule(plan_of(p, job), 12)
            ran += c.schedule == "chimera"
    assert ran


@pytest.mark.slow
def test_what_the_job_asks_for() -> None:
    profile = make_profile()
    asked = make_job(batch=16, parallel={"auto": True, "shard": "zero3", "gather": "microbatch"})
    rows = choose(asked, profile, search_s=0).rows
    assert {row.prediction.candidate.shard for row in rows} == {"zero3"}
    assert {row.prediction.candidate.gather for row in rows} == {"microbatch"}
    never = make_job(batch=16, parallel={"auto": True, "shard": "none"})
    assert {
        r.prediction.candidate.shard for r in choose(never, make_profile(memory_bytes=330 * MIB), search_s=0).rows
    } == {"none"}
    with pytest.raises(SpecError, match="one replica divides nothing"):
        make_job(parallel={"auto": True, "shard": "zero3", "shard_replicas": 1})


def test_graphs_of_tasks_are_planned_undivided_and_within_memory() -> None:
    """A job with them refuses shards; their slots are what has to fit."""
    job = make_job(layers=4, batch=8, compile="inductor", cuda_graphs="tasks")
    profile = make_profile(layers=4, devices=2)
    free = choose(job, profile, search_s=0)
    assert all(row.prediction.candidate.shard == "none" for row in free.rows)
    with_plan(job, free.plan)
    assert any(device.graphs for device in free.best.memory)
    short = profile.model_copy(update={"memory_bytes": 0.8 * max(free.best.memory_bytes)})
    assert choose(job, short, search_s=0).best.fits
