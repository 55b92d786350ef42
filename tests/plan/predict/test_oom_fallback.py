"""What is ruled out without an order of its own would not fit, and what plans fall back to that are too large."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.errors import ScheduleError
from raypipe.plan.best_first import best_first
from raypipe.plan.candidate import Candidate, grids
from raypipe.plan.predict.bounds import waiting
from raypipe.plan.predict.oom_fallback import OOMFallback, least_divided
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.tensor_groups import ALONE, Judges
from raypipe.schedule import generate
from raypipe.schedule.kinds import BACKWARD
from raypipe.schedule.shape import Grid, pipeline_shape
from tests.exhaustive import exhaustive
from tests.plan.conftest import MIB, make_job, make_profile

CASES = [
    {"layers": 3, "devices": 4, "mib": 300, "clip": None},
    *exhaustive(
        {"layers": 4, "devices": 4, "mib": 300, "clip": None}, {"layers": 4, "devices": 4, "mib": 360, "clip": 1.0},
        {"layers": 6, "devices": 4, "mib": 260, "clip": 1.0}, {"layers": 4, "devices": 8, "mib": 240, "clip": None},
    ),
]  # fmt: skip


def predictor(layers: int, devices: int, mib: float, clip: float | None) -> Predictor:
    job = make_job(layers, 2 * devices, clip=clip)
    return Predictor(make_profile(layers, devices, seed=layers, memory_bytes=mib * MIB), job.train, layers)


def test_it_is_never_above_the_memory_of_the_divided_plan() -> None:
    judge, tried = predictor(4, 4, 300, 1.0), 0
    for grid in grids(4, 8, 4, 1, 4):
        for plain in judge.on(grid):
            for c in judge.shard_ways(plain) if plain.shard == "none" else ():
                for way in (c, replace(c, recompute="full")):
                    try:
                        result, whole = judge.predict(way), judge.undivided(way)
                    except ScheduleError:
                        continue
                    assert whole is not None
                    terms = judge.stage_bytes(way, way.form, way.level, way.shard_group)
                    least = least_divided(whole, way.form.placement, way.level, terms)
                    assert all(a.total <= b.total * (1 + 1e-9) for a, b in zip(least, result.memory, strict=True)), way
                    assert not (result.fits and judge.is_too_large(way)), way
                    tried += 1
    assert tried > 200


@pytest.mark.parametrize("name", ["1f1b", "dapple"])
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 3), (3, 1), (3, 2), (4, 4), (4, 9)])
def test_micro_batches_wait_for_a_stages_first_backward(name: str, devices: int, microbatches: int) -> None:
    c = Candidate.on(Grid(devices, 1, 1, microbatches), name)
    schedule = generate(name, pipeline_shape(c, microbatches))
    before = []
    for stage in range(schedule.stages):
        order = [task for tasks in schedule.orders for task in tasks if task.stage == stage]
        first = next(n for n, task in enumerate(order) if task.kind in BACKWARD)
        before.append(sum(len(task.mbs) for task in order[:first]) - 1)
    assert list(waiting(c, c.form)) == before
    # They count against the memory of a stage; a plan with less room than that is ruled out without an order.
    judge = predictor(devices, devices, 1e6, None)
    need = judge.least_excess(c)
    roomy = predictor(devices, devices, (1e6 * MIB + need) / MIB * (1 + 1e-6), None)
    assert not roomy.is_too_large(c)
    most = max(one.total for one in judge.predict(c).memory)
    assert need + 1e6 * MIB <= most * (1 + 1e-9)


def test_a_plan_of_1f1b_that_keeps_all_activations_is_ruled_out_without_an_order() -> None:
    """What waits for a stage's first backward is all there: activations, and messages that were sent with them."""
    judge = predictor(4, 4, 1e6, None)
    c = Candidate.on(Grid(4, 1, 1, 8), "1f1b")
    most = max(one.total for one in judge.predict(c).memory) / MIB
    for share, out in ((0.9, True), (1.0, False)):
        tight = predictor(4, 4, most * share, None)
        assert (tight.outright(c) is not None) == out
    recomputed = replace(c, recompute="full")
    sent = [m.messages for m in judge.predict(recomputed).memory]
    assert sent[0] >= 3 * judge.profile.layers[0].sent_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_plans_are_found_without_it(case, monkeypatch: pytest.MonkeyPatch) -> None:
    def search() -> tuple[list[object], int]:
        every = grids(case["devices"], 2 * case["devices"], case["layers"], 1, 4)
        result = best_first(Judges({ALONE: predictor(**case)}), list(every), 10, near=5e-3)
        return [(p.candidate, p.step_s, p.memory) for p in result.best + result.near], len(result.unmade)

    with_it, ruled_out = search()
    monkeypatch.setattr(OOMFallback, "_divided_outright", lambda *args: None)
    without, fewer = search()
    assert with_it
    assert with_it == without
    assert ruled_out > fewer, "nothing was ruled out"


# Fallbacks of plans whose tasks are CUDA graphs: what micro-batches in flight hold is the graphs' memory.


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
