"""Who is who when a device of the schedule is a group of processes."""

from __future__ import annotations

from raypipe.runtime.setup.setup import (
    own_channels,
    own_groups,
    rank_of,
    tensor_rank_edges,
    tensor_rank_groups,
    tensor_rank_of,
)
from raypipe.schedule import Shape, generate
from raypipe.schedule.passes import replicate
from raypipe.schedule.passes.sync import are_copies
from raypipe.schedule.sharding import copy_groups, copy_ranks, served_by_another, sum_groups


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
    assert copy_ranks(len(placement), 4, 2) == (0, 0, 1, 1) * 2
    assert copy_groups("experts", placement, copies=4, together=1) == {}
    divided = {name: ranks for name, ranks in tensor_rank_groups(groups, 8, 2).items() if 7 in ranks}
    assert own_groups(divided, *tensor_rank_of(7, 2), 2) == {"experts": (3, 7), "tensor": (6, 7)}


def test_stages_of_copies_share_a_communicator() -> None:
    """Chimera's two directions start sums of stages with the same holders in different orders: each keeps its own."""
    for name, devices, chunks, alike in (("interleaved-1f1b", 2, 2, True), ("chimera", 4, 1, False)):
        one = generate(name, Shape(devices=devices, microbatches=4, chunks=chunks))
        whole = replicate(one, 2)
        assert are_copies(whole) == alike
        sums = sum_groups(whole.placement)
        served_by = served_by_another(sums) if alike else {}
        assert served_by == ({"stage 2": "stage 0", "stage 3": "stage 1"} if alike else {})
        opened = {key: ranks for key, ranks in sums.items() if key not in served_by and 0 in ranks}
        own = own_groups(opened, 0, 0, 1, served_by)
        assert own == {key: ranks for key, ranks in sums.items() if 0 in ranks}


def test_copies_whose_orders_differ_are_none() -> None:
    one = replicate(generate("zb-h1", Shape(devices=2, microbatches=4)), 2)
    assert are_copies(one)
    orders = [list(order) for order in one.orders]
    at = next(i for i, task in enumerate(orders[2]) if task.kind == "W")
    orders[2][at - 1], orders[2][at] = orders[2][at], orders[2][at - 1]
    assert not are_copies(one.with_orders(orders))
