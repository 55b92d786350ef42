"""Fallbacks of plans whose tasks are CUDA graphs: what micro-batches in flight hold is the graphs' memory."""

from __future__ import annotations

import pytest

from raypipe.plan.candidate import Candidate
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.schedule.shape import Grid
from tests.plan.conftest import MIB, make_job, make_profile


def predicted(name: str, mib: int) -> tuple[Predictor, Prediction]:
    profile = make_profile(6, 4, memory_bytes=mib * MIB)
    layers = [one.model_copy(update={"workspace_bytes": 20.0 * MIB, "operand_bytes": 10.0 * MIB})
              for one in profile.layers]  # fmt: skip
    job = make_job(6, 8, clip=None, compile="inductor", cuda_graphs="tasks")
    judge = Predictor(profile.model_copy(update={"layers": tuple(layers)}), job.train, 6)
    grid = Grid(stages=4, replicas=1, microbatch=1, microbatches=8)
    return judge, judge.predict(Candidate.on(grid, name, update="wait"))


@pytest.mark.parametrize(("name", "mib"), [("gpipe", 700), ("gpipe", 900), ("zb-h2", 700), ("zb-h2", 900)])
def test_a_plan_that_is_too_large_falls_back(name: str, mib: int) -> None:
    """With bounds that no fallback that fits undercuts, and some of which fit."""
    judge, p = predicted(name, mib)
    assert not p.fits
    assert all(memory.in_flight == memory.graphs > memory.activations == 0 for memory in p.memory)
    found = [(least, judge.predict(other)) for least, other in judge.oom_fallback(p)]
    assert all(least <= other.step_s * (1 + 1e-9) for least, other in found if other.fits)
    assert any(other.fits for _, other in found)
    assert {"microbatches", "layers"} <= {other.candidate.recompute for _, other in found}


def test_as_many_micro_batches_as_there_is_room_for_are_in_flight() -> None:
    """One more of them does not fit any longer."""
    judge, p = predicted("zb-h2", 700)
    limits = {int(c.memory_limit) for _, c in judge.oom_fallback(p) if c.memory_limit is not None}
    room = min(limits)
    fits = {n: judge.predict(c).fits for _, c in judge.oom_fallback(p) if (n := c.memory_limit) is not None}
    assert room == judge.room(p) > 1
    assert fits[room]
    assert not fits[room + 1]
