"""How often the driver goes on after a number that is not finite, and from where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raypipe.checkpoint import commit, step_directory, write_shard
from raypipe.errors import CheckpointError
from raypipe.runtime.recovery.nonfinite import (
    REWINDS_IN_A_ROW,
    SKIPS_IN_A_ROW,
    NonFiniteError,
    NonFinitePolicy,
    left_out_before,
)


def checkpoint(root: Path, step: int, **meta: object) -> Path:
    path = step_directory(root, step)
    return commit(path, step, [write_shard(path, "rank-00000", {"param/0.w": torch.ones(2)})], meta)


def test_a_run_that_is_to_stop_stops(tmp_path: Path) -> None:
    policy = NonFinitePolicy("stop")
    with pytest.raises(NonFiniteError):
        policy.skip(3, "the training loss is nan")
    error = NonFiniteError(3, "the training loss is nan")
    with pytest.raises(NonFiniteError) as caught:
        policy.rewind(error, (0, None), tmp_path, 0)
    assert caught.value is error


def test_only_steps_in_a_row_are_too_many() -> None:
    policy = NonFinitePolicy("skip")
    for step in range(0, 400, 2):
        policy.skip(step, "nan")
    for step in range(401, 401 + SKIPS_IN_A_ROW):
        policy.skip(step, "nan")
    with pytest.raises(NonFiniteError, match="in a row"):
        policy.skip(401 + SKIPS_IN_A_ROW, "nan")


def test_what_lies_between_the_checkpoint_and_the_bad_step_is_left_out_beside_what_was(tmp_path: Path) -> None:
    policy = NonFinitePolicy("rewind")
    path = checkpoint(tmp_path, 4)
    for again in range(REWINDS_IN_A_ROW):
        to = policy.rewind(NonFiniteError(7, "nan"), (4, path), tmp_path, 3 * again)
        assert (to.done, to.checkpoint, to.left_out, to.notices) == (4, path, 3 * again + 3, ())
    later = checkpoint(tmp_path, 6)
    assert policy.rewind(NonFiniteError(7, "nan"), (6, later), tmp_path, 9).left_out == 10  # it has got further
    for _ in range(REWINDS_IN_A_ROW - 1):
        policy.rewind(NonFiniteError(7, "nan"), (6, later), tmp_path, 10)
    with pytest.raises(NonFiniteError, match=f"after {REWINDS_IN_A_ROW} rewinds in a row to step 6"):
        policy.rewind(NonFiniteError(7, "nan"), (6, later), tmp_path, 12)


def test_a_damaged_checkpoint_is_passed_over_with_a_notice(tmp_path: Path) -> None:
    checkpoint(tmp_path, 2)
    damaged = checkpoint(tmp_path, 4)
    (damaged / "rank-00000.safetensors").write_bytes(b"")
    to = NonFinitePolicy("rewind").rewind(NonFiniteError(5, "nan"), (4, damaged), tmp_path, 0)
    assert (to.done, to.left_out) == (2, 3)
    assert "step-00000004" in to.notices[0]


def test_a_checkpoint_says_what_was_left_out_before_it(tmp_path: Path) -> None:
    assert left_out_before(None) == 0
    assert left_out_before(checkpoint(tmp_path, 2)) == 0
    assert left_out_before(checkpoint(tmp_path, 3, left_out=5)) == 5
    with pytest.raises(CheckpointError, match="left_out"):
        left_out_before(checkpoint(tmp_path, 4, left_out="five"))
