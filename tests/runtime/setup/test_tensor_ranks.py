"""Who is who when a device of the schedule is a group of processes."""

from __future__ import annotations

from raypipe.runtime.setup.setup import (
    copy_groups,
    expert_ranks,
    own_channels,
    own_groups,
    rank_of,
    tensor_rank_edges,
    tensor_rank_groups,
    tensor_rank_of,
)


def test_ranks_go_device_by_device() -> None:
    assert [rank_of(d, m, 3) for d in range(2) for m in range(3)] == list(range(6))
    assert [tensor_rank_of(rank, 3) for rank in range(6)] == [(d, m) for d in range(2) for m in range(3)]


def test_equal_members_talk_to_each_other() -> None:
    assert tensor_rank_edges([(0, 1), (1, 0)], 2) == ((0, 2), (1, 3), (2, 0), (3, 1))
    assert own_channels({3: "to 3", 7: "to 7"}, 2) == {1: "to 3", 3: "to 7"}


def test_groups_are_of_equal_members_or_of_one_device() -> None:
    groups = tensor_rank_groups({"stage 0": (0, 2), "tied 0.token.weight": (0, 1)}, 3, 2)
    assert groups == {
        "stage 0, tensor rank 0": (0, 4), "stage 0, tensor rank 1": (1, 5),
        "tied 0.token.weight, tensor rank 0": (0, 2), "tied 0.token.weight, tensor rank 1": (1, 3),
        "tensor 0": (0, 1), "tensor 1": (2, 3), "tensor 2": (4, 5),
    }  # fmt: skip
    of_rank_5 = {name: ranks for name, ranks in groups.items() if 5 in ranks}
    assert own_groups(of_rank_5, *tensor_rank_of(5, 2), 2) == {"stage 0": (1, 5), "tensor": (4, 5)}


def test_without_a_group_nothing_changes() -> None:
    groups = {"stage 0": (0, 1)}
    assert tensor_rank_groups(groups, 2, 1) == groups == own_groups(groups, 1, 0, 1)
    assert tensor_rank_edges([(0, 1)], 1) == ((0, 1),)


def test_each_device_exchanges_tokens_with_its_like_in_consecutive_copies() -> None:
    """Four copies of two devices, both directions on each: one group for both, and of each tensor rank alone."""
    placement = [row for w in range(4) for row in ((2 * w, 2 * w + 1), (2 * w + 1, 2 * w))]
    groups = copy_groups("experts", placement, copies=4, together=2)
    assert sorted(groups.values()) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert expert_ranks(len(placement), 4, 2) == (0, 0, 1, 1) * 2
    assert copy_groups("experts", placement, copies=4, together=1) == {}
    divided = {name: ranks for name, ranks in tensor_rank_groups(groups, 8, 2).items() if 7 in ranks}
    assert own_groups(divided, *tensor_rank_of(7, 2), 2) == {"experts": (3, 7), "tensor": (6, 7)}
