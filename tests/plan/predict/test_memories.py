"""A search asks for one plan's memory several times, and it is found once."""

from __future__ import annotations

from dataclasses import replace

import pytest

import raypipe.plan.predict.memories as memories
from raypipe.plan.candidate import Candidate
from raypipe.plan.choice import deepest
from raypipe.plan.predict.predictor import Predictor
from raypipe.schedule.shape import Grid
from tests.plan.conftest import MIB, make_job, make_profile


def test_ways_of_recomputing_that_keep_nothing_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too large even with all recomputed, so each way tries that and then keeps nothing."""
    profile, job = make_profile(memory_bytes=200 * MIB), make_job(clip=1.0)
    played, measure = [], memories.device_memory

    def counted(*args, **more):
        played.append(args)
        return measure(*args, **more)

    monkeypatch.setattr(memories, "device_memory", counted)
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
