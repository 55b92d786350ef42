"""What is ruled out without an order of its own would not fit, and ruling it out changes no decision."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.errors import ScheduleError
from raypipe.plan.best_first import best_first
from raypipe.plan.candidate import grids
from raypipe.plan.predict.oom_fallback import OOMFallback, least_divided
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.tensor_groups import ALONE, Judges
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
