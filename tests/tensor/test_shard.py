"""Shares of a parameter and the whole they make."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from raypipe.tensor import Shard


def test_each_part_of_a_fused_parameter_is_divided() -> None:
    whole = torch.arange(12).view(1, 12)  # q: 0..5, k: 6..8, v: 9..11
    shard = Shard(1, (6, 3, 3), 3)
    assert shard.cut(whole, 1).tolist() == [[2, 3, 7, 10]]
    assert shard.whole_shape((1, 4)) == (1, 12)


def test_a_table_that_does_not_divide_is_filled_up_with_zeros() -> None:
    whole = torch.arange(1, 6).view(5, 1)
    shard = Shard(0, (5,), 4, padded=True)
    assert [shard.cut(whole, rank).flatten().tolist() for rank in range(4)] == [[1, 2], [3, 4], [5, 0], [0, 0]]


@given(
    size=st.integers(1, 4), units=st.lists(st.integers(1, 3), min_size=1, max_size=3), dim=st.integers(0, 1),
    cut_off=st.integers(0, 3),
)  # fmt: skip
def test_shares_make_the_whole_again(size: int, units: list[int], dim: int, cut_off: int) -> None:
    parts = tuple(n * size for n in units)
    if padded := len(parts) == 1:
        parts = (max(1, parts[0] - cut_off),)
    shard = Shard(dim, parts, size, padded)
    shape = [3, 3]
    shape[dim] = sum(parts)
    whole = torch.randn(shape)
    shares = [shard.cut(whole, rank) for rank in range(size)]
    local = list(shape)
    local[dim] = sum(-(-part // size) for part in parts)
    assert all(list(share.shape) == local and share.is_contiguous() for share in shares)
    assert shard.whole_shape(shares[0].shape) == tuple(shape)
    assert torch.equal(shard.join(shares), whole)
    whole.zero_()  # a share has memory of its own
    assert not torch.equal(shard.join(shares), whole)
