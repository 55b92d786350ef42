"""A small share of what ``python -m tests.bench.safety.corruptions`` does to checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.safety import checkpoints
from tests.bench.safety.corruptions import NEWER, OLDER, corrupted


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_found(seed: int, tmp_path: Path) -> None:
    for step in (OLDER, NEWER):
        checkpoints.write(tmp_path / "right", step)
    corrupted(tmp_path / "right", tmp_path / "root", seed)
