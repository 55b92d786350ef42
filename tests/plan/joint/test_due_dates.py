"""Due dates of one arrangement, and how far stages run ahead, improved step by step."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from raypipe.plan.candidate import Candidate
from raypipe.plan.choice import deepest
from raypipe.plan.joint.arrangement import balanced
from raypipe.plan.joint.better_plans import PlanModel
from raypipe.plan.joint.orders_of import DueDates, OrdersOf, Way
from raypipe.plan.predict.predictor import Predictor
from raypipe.schedule.shape import Grid
from raypipe.search.budget import Budget
from raypipe.search.list_scheduling import LaneArrays
from raypipe.search.objective import Measure, Objective
from raypipe.search.priorities import PACES
from tests.plan.conftest import make_job, make_profile

DEVICES, COUNT = 3, 9


def _model() -> PlanModel:
    profile, job = make_profile(layers=12, devices=DEVICES, seed=5), make_job(layers=12, batch=COUNT, clip=1.0)
    c = replace(Candidate.on(Grid(DEVICES, 1, 1, COUNT), "auto", placement="free"), update="wait")
    return PlanModel(Predictor(profile, job.train, deepest(job, profile)), c)


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_orders_get_no_longer_and_are_those_of_the_problem(objective: Objective) -> None:
    """What is said of an order is what a problem, built whole, says of it; with room for few activations as well."""
    model, rng = _model(), random.Random(2)
    a = balanced([x.times[1].forward for x in model.judge.profile.layers], (0, 1, 2, 1, 0, 2), (1.0,) * 6, 6)
    row = np.array(a.row)
    x = model.stages(*a.arrays(len(row)), len(row))
    assert x is not None
    shorter = 0
    for cap in (COUNT * 2.0, 5.0, 3.0):
        tight = x._replace(cap=np.full(DEVICES, cap))
        due_dates = DueDates(COUNT, objective, rng)
        start = Way(PACES[0], np.full(len(row), float(COUNT)))
        first = due_dates.best(row, tight, [start])
        tuned = due_dates.tuned(row, tight, start, Budget(1.0))
        assert tuned is not None
        if first is not None:
            assert tuned.mean <= first.mean
            shorter += tuned.value < first.value
        orders = OrdersOf(model, objective, Budget(1.0), rng)
        made = orders.by_due_dates(a, tuned.way, tight.cap.tolist())
        assert made is not None
        assert made.value == pytest.approx(tuned.value, rel=1e-12)
        assert Measure(LaneArrays.of(made.problem), model.costs(a), objective).value(made.orders) == pytest.approx(
            made.value
        )
        assert all(peak <= cap * (1 + 1e-9) for peak in made.problem.peaks(made.orders))
    assert shorter


def test_no_stage_runs_further_ahead_than_it_may() -> None:
    model, rng = _model(), random.Random(4)
    a = balanced([x.times[1].forward for x in model.judge.profile.layers], (0, 1, 2), (1.0,) * 3, 3)
    orders = OrdersOf(model, "makespan", Budget(1.0), rng)
    for most in (1.0, 2.0, 5.0):
        made = orders.by_due_dates(a, Way(PACES[0], np.full(3, most)))
        assert made is not None
        for order in made.orders:
            lead = worst = 0
            for t in order:
                kind = made.problem.kind[made.problem.lane[t]]
                lead += (kind == "F") - (kind == "B")
                worst = max(worst, lead)
            assert worst <= most
