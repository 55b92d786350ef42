"""What is enumerated: everything that makes sense, each once, and nothing that a family refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.errors import ScheduleError
from raypipe.plan.candidate import Candidate, candidates, chunk_counts, grids, unit_sizes
from raypipe.plan.predict.form import Form
from raypipe.plan.predict.orders import Orders
from raypipe.schedule import SCHEDULES
from raypipe.schedule.live_activations import peak_activations
from raypipe.schedule.passes import place_gradient_sync, replicate
from raypipe.schedule.shape import Grid
from tests.plan.conftest import form_on


def test_every_division_of_the_devices_is_there() -> None:
    result = list(grids(6, 12, 4, 1, 8))
    assert len(result) == len(set(result))
    expected = {
        Grid(d, w, b, 12 // (w * b))
        for d in range(1, 5) for w in range(1, 7) for b in range(1, 9) if d * w <= 6 and 12 % (w * b) == 0
    }  # fmt: skip
    assert set(result) == expected
    assert Grid(1, 1, 4, 3) in result  # one device
    assert Grid(1, 6, 2, 1) in result  # data parallelism alone


def test_every_family_is_there_and_what_is_the_same_is_there_once() -> None:
    made = list(candidates(Grid(4, 2, 2, 8), 16))
    assert len(made) == len(set(made))
    assert {c.schedule for c in made} == {n for n, family in SCHEDULES.items() if n != "dapple" and not family.paired}
    assert {c.schedule for c in candidates(Grid(4, 2, 2, 8), 16, {"schedule": "dualpipev"})} == {"dualpipev"}
    assert ("gpipe", 1) in {(c.schedule, c.chunks) for c in made}
    assert ("bfs", 1) not in {(c.schedule, c.chunks) for c in made}
    assert {c.concat for c in made if c.schedule == "chimera"} == {"direct", "doubling", "halving"}
    assert {c.pipelines for c in made if c.schedule == "chimera"} == {2, 4}
    assert {c.unit for c in made if c.schedule == "zeropp"} == {4, 7, 8}
    assert all(c.form.stages <= 16 for c in made)


def test_odd_depths_have_no_bidirectional_schedule_and_odd_micro_batches_no_halves() -> None:
    odd = {c.schedule for c in candidates(Grid(3, 1, 2, 6), 12)}
    assert odd.isdisjoint({"chimera", "chimera-tight", "gems"})
    assert "halving" not in {c.concat for c in candidates(Grid(4, 1, 1, 8), 12)}


def test_candidates_can_be_generated_unless_the_family_says_why_not() -> None:
    orders = Orders()
    refused = set()
    for grid in (Grid(2, 1, 2, 5), Grid(4, 1, 2, 3), Grid(5, 2, 1, 7)):
        for c in candidates(grid, 12):
            try:
                schedule = orders.of(c, c.microbatches).schedule
            except ScheduleError:
                refused.add(c.schedule)
                continue
            assert schedule.placement == c.form.placement
            assert schedule.devices == c.stages
    assert refused <= {"pipedream", "pipedream-2bw"}  # fewer micro-batches than devices


def test_forms_are_those_of_the_whole_schedules() -> None:
    form = form_on(4, "chimera", concat="doubling")
    assert isinstance(form, Form)
    assert (form.joint, form.replicas, form.recomputes) == (True, 2, frozenset(range(4)))
    split = form_on(3, "zb-v", chunks=2)
    assert isinstance(split, Form)
    assert (split.joint, split.stages, split.placement) == (False, 6, ((0, 1, 2, 2, 1, 0),))
    assert isinstance(form_on(3, "chimera"), ScheduleError)


def test_counts_that_are_tried() -> None:
    assert chunk_counts(4, 20) == [1, 2, 3, 4]
    assert chunk_counts(3, 30) == [1, 2, 3, 4, 6, 8]
    assert unit_sizes(4, 16) == [4, 7, 8, 16]


def test_simpler_plans_come_first() -> None:
    single, parallel = Candidate.on(Grid(1, 1, 4, 2), "1f1b"), Candidate.on(Grid(1, 2, 4, 1), "1f1b")
    deep, exotic = (Candidate.on(Grid(2, 1, 4, 2), name) for name in ("1f1b", "chimera"))
    eager = replace(deep, sync="eager")
    ranked = sorted([exotic, deep, parallel, single, eager], key=lambda c: c.simplicity)
    assert ranked == [single, parallel, deep, eager, exotic]


@pytest.mark.parametrize("sync", ["lazy", "eager", "eager-opt"])
def test_sums_of_one_copy_are_placed_as_those_of_many(sync) -> None:
    schedule = Orders().of(Candidate.on(Grid(3, 2, 1, 6), "zb-v", chunks=2), 6).schedule
    one = place_gradient_sync(schedule, sync, copies=4)
    many = place_gradient_sync(replicate(schedule, 4), sync)
    assert one.orders == many.orders[:3]
    assert peak_activations(one) == peak_activations(many)[:3]
