"""Cut, placement and order found together: never worse, within memory, as a clock of its own has it, and runnable."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from raypipe.launch.plans import with_plan
from raypipe.plan.best_first import NEAR
from raypipe.plan.candidate import Candidate
from raypipe.plan.certificate.of_plan import Certifiers
from raypipe.plan.choice import deepest
from raypipe.plan.choose import choose, plan_of
from raypipe.plan.decision_json import as_json
from raypipe.plan.joint.arrangement import balanced, first_arrangements, loads
from raypipe.plan.joint.better_plans import PlanModel, better_plan, better_plans, fitting
from raypipe.plan.joint.orders_of import OrdersOf, Way
from raypipe.plan.plan import Plan, build_schedule
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.reasons import why_won
from raypipe.plan.tensor_groups import ALONE, Judges
from raypipe.schedule.forms.text import to_text
from raypipe.schedule.shape import Grid
from raypipe.search.budget import Budget
from raypipe.search.priorities import PACES
from tests.exhaustive import exhaustive
from tests.plan.conftest import make_job, make_profile
from tests.plan.joint.clock import Layer, time_of


def with_head(profile, times: float):
    """The profile with a head that takes so many times as long."""
    head = profile.layers[-1]
    slow = head.model_copy(update={"times": {n: t.scaled(times) for n, t in head.times.items()}})
    return profile.model_copy(update={"layers": (*profile.layers[:-1], slow)})


def plain_layers(profile, microbatch: int) -> tuple[list[Layer], list[float]]:
    result = []
    for x in profile.layers:
        t = x.times[microbatch]
        result.append(
            Layer(
                t.forward,
                t.input_grad,
                t.weight_grad,
                t.joint,
                x.kept_bytes * microbatch,
                x.waiting * microbatch,
                16.0 * x.parameters,
            )
        )
    return result, [profile.inside.seconds(x.output_bytes * microbatch) for x in profile.layers]


def test_first_arrangements_are_balanced_lines_rings_and_vs() -> None:
    work = [1.0] * 11 + [4.0]
    before = [*map(float, range(12)), 15.0]
    result = list(first_arrangements(work, 3, 12))
    assert result[0].row == (0, 1, 2)
    assert max(loads(before, result[0].starts, result[0].row, 3)) == 5.0
    assert {a.row for a in result} >= {(0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0, 0, 1, 2)}
    assert all(max(loads(before, a.starts, a.row, 3)) <= 6.0 for a in result if len(a.row) <= 6)
    thin = balanced([1.0] * 20, (0, 1, 1, 0), (0.4, 0.4, 1.0, 1.0), 2)
    assert [len(own) for own in thin.cut] == [3, 3, 7, 7]
    assert max(loads([float(i) for i in range(21)], thin.starts, thin.row, 2)) == 10.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "clip"),
    [
        (0, None),
        (1, 1.0),
        *exhaustive((0, 1.0), (1, None), *((seed, clip) for seed in (2, 3, 4) for clip in (None, 1.0))),
    ],
)
def test_what_is_returned_is_faster_and_fits_and_the_clock_agrees(seed, clip) -> None:
    rng = random.Random(seed)
    profile = with_head(
        make_profile(layers=8, devices=4, seed=seed, devices_per_host=4, between=make_profile().inside),
        rng.choice([1, 4]),
    )
    job = make_job(layers=8, batch=8, clip=clip)
    judge = Predictor(profile, job.train, deepest(job, profile))
    judges = Judges({ALONE: judge})
    update = "wait" if clip else "auto"
    grid = Grid(4, 1, 1, 8)
    ranked = [
        judge.predict(Candidate.on(grid, name, chunks=v, update=update))
        for name, v in (("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-v", 2))
    ]
    if seed % 2:  # no more memory than the leanest of them takes
        least = min(max(p.memory_bytes) for p in ranked)
        profile = profile.model_copy(update={"memory_bytes": least})
        judge = Predictor(profile, job.train, deepest(job, profile))
        judges = Judges({ALONE: judge})
        ranked = [judge.predict(p.candidate) for p in ranked]
    ranked = sorted((p for p in ranked if p.fits), key=lambda p: p.step_s)
    for p in better_plans(judges, ranked, 1.0, Certifiers(judges)):
        assert p.step_s < ranked[0].step_s
        assert p.fits
        assert max(p.memory_bytes) <= profile.memory_bytes
        assert p.moved is not None
        layers, messages = plain_layers(profile, 1)
        timed = time_of(to_text(judge.schedule_of(p)), [list(own) for own in p.cut], layers, messages)
        if clip:
            updates = 2e-9 * max(
                sum(
                    profile.layers[i].parameters
                    for s, own in enumerate(p.cut)
                    if p.form.placement[0][s] == d
                    for i in own
                )
                for d in range(4)
            )
            assert p.step_s == pytest.approx(timed.makespan + updates + judge.overheads(p.candidate).norm_s, rel=1e-9)
        else:
            assert p.step_s <= timed.makespan * (1 + 1e-9) + 2e-9 * sum(x.parameters for x in profile.layers)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *exhaustive(1, 2)])
def test_the_planner_is_never_worse_for_it(seed) -> None:
    profile = with_head(make_profile(layers=6, devices=4, seed=seed, source="analytic"), 5.0)
    job = make_job(layers=6, batch=8, clip=1.0)
    without = choose(job, profile, search_s=0)
    result = choose(job, profile, search_s=0.6)
    fastest = min(row.prediction.step_s for row in without.rows if row.group == "ranked")
    assert result.best.step_s <= fastest * (1 + NEAR)
    assert min(row.prediction.step_s for row in result.rows if row.group == "ranked") <= fastest * (1 + 1e-9)
    rows = as_json(result)["candidates"]
    assert all(row["bound_s"] <= row["predicted_step_s"] and row["gap"] >= 0 for row in rows if row["fits"])
    assert {row["binds"] for row in rows if row["fits"]} <= {"compute", "link", "memory", "barrier"}
    assert result.plan.bound_s == rows[0]["bound_s"]
    assert any(note.startswith("Certificate") for note in result.notes)


@pytest.mark.slow
def test_a_free_plan_is_found_said_written_and_read_back() -> None:
    """A head of two blocks: stages that differ in size, which no named placement has, in a plan that can be run."""
    profile = with_head(make_profile(layers=8, devices=4, seed=1, devices_per_host=4), 3.0)
    job = make_job(layers=8, batch=8, clip=1.0)
    judge = Predictor(profile, job.train, deepest(job, profile))
    judges = Judges({ALONE: judge})
    ranked = [judge.predict(Candidate.on(Grid(4, 1, 1, 8), "1f1b", update="wait"))]
    result = better_plans(judges, ranked, 1.0, Certifiers(judges))
    assert [p.candidate.placement for p in result] == ["free"]
    assert "cut, placement and order found together" in why_won(result[0], result[0])
    plan = Plan.model_validate_json(plan_of(result[0], job).text())
    schedule = build_schedule(plan, job.train.batch)
    assert schedule.placement == result[0].form.placement
    assert (plan.parallel.placement, plan.parallel.stages) == ("free", 4)
    assert plan.parallel.replans  # other orders of the same stages, while it runs
    assert with_plan(job, plan).parallel == plan.parallel


@pytest.mark.parametrize("by_due_dates", [False, True])
def test_an_order_that_takes_a_little_too_much_is_made_again_with_an_activation_less(by_due_dates: bool) -> None:
    """Activations come in lumps: leaving free what was too much alone would give the same order again."""
    profile, job = make_profile(layers=8, devices=4, seed=3), make_job(layers=8, batch=12, clip=1.0)
    c = replace(Candidate.on(Grid(4, 1, 1, 12), "auto", placement="free"), update="wait")
    a = balanced([x.times[1].forward for x in profile.layers], (0, 1, 2, 3), (1.0,) * 4, 4)

    def searched(judge: Predictor) -> tuple[OrdersOf, PlanModel]:
        model = PlanModel(judge, c)
        return OrdersOf(model, "makespan", Budget(30.0), random.Random(0)), model

    judge = Predictor(profile, job.train, deepest(job, profile))
    orders, model = searched(judge)
    one = orders.tuned(a, Way(PACES[0], np.full(4, 12.0)), 0.02) if by_due_dates else orders.of(a, first=True)
    assert one is not None
    assert (one.way is not None) == by_due_dates
    p = judge.predict_order(c, one.problem.schedule(one.orders), a.cut)
    tight = profile.model_copy(update={"memory_bytes": max(p.memory_bytes) - 1.0})
    judge = Predictor(tight, job.train, deepest(job, tight))
    orders, model = searched(judge)
    assert not judge.predict_order(c, one.problem.schedule(one.orders), a.cut).fits
    again = fitting(judge, c, model, one, orders)
    assert again is not None
    assert again.fits
    full = p.fullest
    assert again.memory[full].activations < p.memory[full].activations
    if by_due_dates:
        assert again.step_s < 1.05 * p.step_s


@pytest.mark.slow
def test_keys_that_a_job_gives_are_kept() -> None:
    profile = with_head(make_profile(layers=8, devices=4, seed=1, devices_per_host=4), 6.0)
    for wishes in ({"schedule": "1f1b"}, {"chunks": 2}, {"shard": "zero1"}):
        result = choose(make_job(layers=8, batch=8, parallel={"auto": True, **wishes}), profile, search_s=0.3)
        assert all(row.prediction.candidate.placement != "free" for row in result.rows)


def test_a_plan_that_is_proven_best_is_left_alone() -> None:
    """One micro-batch on devices with links so slow that one message would cost more than it could bring."""
    link = {"alpha_s": 100.0, "beta_s_per_byte": 0.0}
    profile = make_profile(layers=4, devices=2, inside=link, between=link)
    job = make_job(layers=4, batch=1)
    judge = Predictor(profile, job.train, deepest(job, profile))
    p = judge.predict(Candidate.on(Grid(2, 1, 1, 1), "1f1b"))
    certifiers = Certifiers(Judges({ALONE: judge}))
    other = better_plan(judge, replace(p, step_s=certifiers.of(p).assigned(p, 0.1).bound_s), 0.2, certifiers.of(p))
    assert other is None
