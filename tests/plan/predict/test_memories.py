"""A search asks for one plan's memory several times, and it is found once."""

from __future__ import annotations

from dataclasses import replace

import pytest

import raypipe.plan.predict.predictor as predictor
from raypipe.plan.candidate import Candidate
from raypipe.plan.choice import choice_of, deepest
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.remedies import _in_turn, _least_ways, _shortest
from raypipe.schedule.shape import Grid
from tests.plan.conftest import MIB, make_job, make_profile


def test_ways_of_recomputing_that_keep_nothing_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too large even with all recomputed, so each way tries that and then keeps nothing."""
    profile, job = make_profile(memory_bytes=200 * MIB), make_job(clip=1.0)
    played, measure = [], predictor.device_memory

    def counted(*args, **more):
        played.append(args)
        return measure(*args, **more)

    monkeypatch.setattr(predictor, "device_memory", counted)
    judge = Predictor(profile, job.train, deepest(job, profile))
    plain = Candidate.on(Grid(4, 1, 1, 8), "1f1b")
    result = [judge.predict(replace(plain, recompute=way)) for way in ("full", "microbatches", "layers")]
    assert len(played) == 1
    assert not result[0].fits
    assert result[0].memory == result[1].memory == result[2].memory
    none = judge.predict(plain)
    assert len(played) == 2
    assert none.memory != result[0].memory
    for p in (*result, none):
        alone = Predictor(profile, job.train, deepest(job, profile)).predict(p.candidate)
        assert (alone.memory, alone.step_s) == (p.memory, p.step_s)
    judge.predict(replace(plain, update="wait"))
    assert len(played) == 2 + 4 + 1, "four judges of their own, and another norm policy, which keeps no copies"


def test_few_micro_batches_that_follow_one_another_hold_as_much_as_many() -> None:
    """Which is why no more of them are played to say how much memory any plan needs at least."""
    job, profile = make_job(batch=64), make_profile(layers=8)
    choice = choice_of(job, profile, 4)
    ways = {
        way
        for grid in choice.grids
        for c in _in_turn(choice, grid, every=False)
        for way in _least_ways(choice, c)
        if _shortest(choice.judge, way) != way
    }
    assert {way.level for way in ways} == {0, 1, 2, 3}
    for way in ways:
        few = Predictor(profile, job.train, deepest(job, profile)).predict(_shortest(choice.judge, way))
        assert choice.judge.of(way).predict(way).memory_bytes == pytest.approx(few.memory_bytes, rel=1e-9)
