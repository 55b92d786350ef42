"""A long step's figures from short ones are those of the long step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from raypipe.plan.candidate import Candidate, candidates
from raypipe.plan.predict import at_scale as scale
from raypipe.plan.predict.at_scale import at_scale
from raypipe.plan.predict.predictor import Predictor
from raypipe.schedule import SCHEDULES
from raypipe.schedule.shape import Grid
from tests.exhaustive import exhaustive
from tests.plan.conftest import make_job, make_profile

SOME = ("1f1b", "interleaved-1f1b", "zb-v", "chimera", "zeropp")
NAMES = [n for n in SCHEDULES if n not in (*SOME, "dapple", "pipedream", "pipedream-2bw")]


def test_a_line_is_followed_and_a_bend_is_not() -> None:
    seen: list[int] = []

    def bent(count: int) -> np.ndarray:
        seen.append(count)
        return np.array([max(5.0 * count + 7.0, 6.0 * count - 90.0), 3.0])

    assert at_scale(bent, 90, 2).tolist() == [457.0, 3.0]  # on the line until 97
    assert 90 not in seen
    kinks = [10.0, 11.0]

    def kinked(count: int) -> np.ndarray:
        return np.array([float(count) if count < kinks[0] else 3.0 * count])

    assert at_scale(kinked, 1000, 5).tolist() == [3000.0]  # three points not on a line: measured whole


def test_a_step_above_the_limit_is_never_measured() -> None:
    """The figure grows in a pattern of seven turns, so that no three neighbours lie on a line."""
    seen: list[int] = []

    def uneven(count: int) -> np.ndarray:
        seen.append(count)
        return np.array([100.0 + sum(4.0 + (k * k) % 7 for k in range(count // 3))])

    result = at_scale(uneven, 3 * 70_000 + 1, 3, most=600)
    assert max(seen) <= 600
    assert result == pytest.approx(uneven(3 * 70_000 + 1), rel=2e-2)
    assert at_scale(uneven, 599, 3, most=600) == uneven(599)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "unit"), [(600, 300), (600, 600), (1200, 60), (601, 7)])
def test_units_too_long_to_be_timed(count: int, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of as many shorter units, against the step simulated whole."""
    profile = make_profile(8, 4, seed=5)
    c = Candidate.on(Grid(4, 1, 1, count), "zeropp", chunks=2, unit=unit)
    figures = []
    for direct, longest in ((100_000_000, 100_000_000), (0, 3 * 8 * 50)):
        monkeypatch.setattr(scale, "DIRECT", direct)
        monkeypatch.setattr(scale, "LONGEST", longest)
        p = Predictor(profile, make_job(8, count).train, 8).predict(c, timed=True)
        figures.append([p.step_s, p.busy_s, *p.memory_bytes])
    assert figures[1] == pytest.approx(figures[0], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SOME, *exhaustive(*NAMES)])
def test_figures_of_long_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same step simulated whole: time, busy time and memory of every device."""
    rng = random.Random(name)
    profile = make_profile(8, 4, seed=5)
    made = [c for c in candidates(Grid(4, 2, 1, 90), 8) if c.schedule == name and c.unit in (None, 8, 90)]
    for c in rng.sample(made, min(2, len(made))):
        figures = []
        clip = rng.choice([None, 1.0])
        for direct in (100_000_000, 0):
            monkeypatch.setattr(scale, "DIRECT", direct)
            judge = Predictor(profile, make_job(8, 180, clip=clip).train, 8)
            p = judge.predict(c, timed=True)
            figures.append([p.step_s, p.busy_s, *p.memory_bytes])
        assert figures[1] == pytest.approx(figures[0], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("longest", [120_000, 3 * 12 * 100])
@pytest.mark.parametrize("shard", ["none", "zero2"])
def test_memory_of_1f1b_that_keeps_some(shard: str, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many micro-batches as memory holds are kept on every device: the same shares, and the same memory, as from
    playing the whole step."""
    profile = make_profile(12, 24, seed=5, memory_bytes=500 * 2**20)
    c = Candidate.on(Grid(12, 2, 1, 211), "1f1b", recompute="microbatches", shard=shard)
    found = []
    for direct, most in ((100_000_000, 100_000_000), (0, longest)):
        monkeypatch.setattr(scale, "DIRECT", direct)
        monkeypatch.setattr(scale, "LONGEST", most)
        found.append(Predictor(profile, make_job(12, 422).train, 12).predict(c))
    assert len(set(found[0].keep or ())) > 2
    assert found[1].keep == found[0].keep
    assert found[1].memory_bytes == pytest.approx(found[0].memory_bytes, rel=1e-9)
