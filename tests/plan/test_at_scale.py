"""A long step's figures from short ones are those of the long step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from raypipe.plan import predict
from raypipe.plan.at_scale import at_scale
from raypipe.plan.candidate import Grid, candidates
from raypipe.plan.predict import Predictor
from raypipe.schedule import SCHEDULES
from tests.plan.conftest import make_job, make_profile


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


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n not in ("dapple", "pipedream", "pipedream-2bw")])
def test_figures_of_long_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same step simulated whole: time, busy time and memory of every device."""
    rng = random.Random(name)
    profile = make_profile(8, 4, seed=5)
    made = [c for c in candidates(Grid(4, 2, 1, 90), 8) if c.schedule == name and c.unit in (None, 8, 90)]
    for c in rng.sample(made, min(2, len(made))):
        figures = []
        clip = rng.choice([None, 1.0])
        for direct in (100_000_000, 0):
            monkeypatch.setattr(predict, "DIRECT", direct)
            judge = Predictor(profile, make_job(8, 180, clip=clip).train, 8)
            p = judge.predict(c, timed=True)
            figures.append([p.step_s, p.busy_s, *p.memory_bytes])
        assert figures[1] == pytest.approx(figures[0], rel=1e-9)
