"""A small share of what ``python -m tests.bench.safety.fuzz`` and ``corruptions`` try."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.safety import checkpoints
from tests.bench.safety.corruptions import NEWER, OLDER, corrupted
from tests.bench.safety.fuzz import fuzz
from tests.bench.safety.targets import Target, targets
from tests.bench.safety.trial import DEFECTS, SilentError, attempt, expect

KINDS = {
    "job": 60, "overrides": 15, "job text": 60, "plan": 30, "schedule text": 60, "schedule JSON": 60, "manifest": 30,
    "profile": 15, "cluster": 30, "epochs": 15, "placement": 15, "tensor table": 15, "run directory": 15, "options": 60,
}  # fmt: skip
"""Inputs of each kind: more where nothing else tries them."""


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return targets(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_input_ends_in_a_traceback_or_a_hang_or_is_wrong_and_taken(kind: str, known: dict[str, Target]) -> None:
    assert set(known) == set(KINDS)
    counts, defects = fuzz(known[kind], KINDS[kind], 1)
    assert not defects, defects[0]
    assert not any(counts[verdict] for verdict in DEFECTS)
    assert sum(counts.values()) >= 10


def test_the_trial_tells_what_it_is_made_to_tell() -> None:
    def hangs(_: object) -> None:
        import time

        from tests.bench.safety import trial

        with trial.at_most(0.05):
            time.sleep(5)

    def fails(_: object) -> None:
        raise KeyError("x")

    assert attempt(lambda _: None, 0).verdict == "taken"
    assert attempt(lambda _: expect(False, "wrong"), 0).verdict == "silent"
    assert attempt(fails, 0).verdict == "traceback"
    assert attempt(hangs, 0).verdict == "hang"
    with pytest.raises(SilentError):
        expect(False, "wrong")


# A small share of what ``python -m tests.bench.safety.corruptions`` does to checkpoints.


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_found(seed: int, tmp_path: Path) -> None:
    for step in (OLDER, NEWER):
        checkpoints.write(tmp_path / "right", step)
    corrupted(tmp_path / "right", tmp_path / "root", seed)
