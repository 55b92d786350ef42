"""Who can give a replacement its state, against what stands in the placement."""

from __future__ import annotations

from itertools import combinations

import pytest

from raypipe.runtime.recovery.replacement import transfers
from raypipe.schedule import generate
from raypipe.schedule.shape import Shape


@pytest.mark.parametrize(
    ("name", "stages", "copies"), [("1f1b", 2, 1), ("1f1b", 2, 3), ("zb-v", 2, 2), ("chimera", 4, 1)]
)
@pytest.mark.parametrize("tensor", [1, 2])
def test_every_stage_of_the_dead_comes_from_a_living_holder(name: str, stages: int, copies: int, tensor: int) -> None:
    one = generate(name, Shape(devices=stages, microbatches=4)).placement
    devices = 1 + max(d for row in one for d in row)
    placement = [[d + copy * devices for d in row] for copy in range(copies) for row in one]
    ranks = range(devices * copies * tensor)
    for dead in [{r} for r in ranks] + [set(pair) for pair in combinations(ranks, 2)]:
        wanted = {
            (rank, (stage, replica))
            for rank in dead
            for replica, row in enumerate(placement)
            for stage, device in enumerate(row)
            if device == rank // tensor
        }
        result = transfers(placement, dead, tensor)
        lost = any(all(row[stage] * tensor + rank % tensor in dead for row in placement) for rank, (stage, _) in wanted)
        assert (result is None) == lost
        for move in result or ():
            assert move.sender not in dead
            assert move.sender % tensor == move.receiver % tensor
            (stage, replica), (same, target) = move.source, move.target
            assert stage == same
            assert placement[replica][stage] == move.sender // tensor
            assert placement[target][stage] == move.receiver // tensor
        assert result is None or {(move.receiver, move.target) for move in result} == wanted


def test_experts_come_from_a_copy_with_the_same_share() -> None:
    placement, shares = [[0, 1], [2, 3], [4, 5], [6, 7]], (0, 1, 0, 1)
    assert {(move.receiver, move.sender) for move in transfers(placement, {2, 5}, 1, shares) or ()} == {(2, 6), (5, 1)}
    assert transfers(placement, {2, 6}, 1, shares) is None
