"""Rounds of process groups: every group once, no rank twice in a round, and few rounds."""

from __future__ import annotations

import os
import random
from itertools import pairwise

import pytest

from raypipe.runtime.setup.communicators import Topology
from raypipe.runtime.setup.setup import tensor_rank_edges, tensor_rank_groups
from raypipe.runtime.transport.channel import Peer
from raypipe.runtime.transport.process_groups import LAZY, connected, connected_on_use, in_rounds
from raypipe.schedule import Shape, generate
from raypipe.schedule.lowering.programs import edges
from raypipe.schedule.passes import replicate
from raypipe.schedule.sharding import sum_groups


def test_rounds_of_random_groups() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        ranks = rng.randint(2, 24)
        groups = [rng.sample(range(ranks), rng.randint(2, min(ranks, 5))) for _ in range(rng.randint(0, 40))]
        rounds = in_rounds(groups)
        assert sorted(index for one in rounds for index in one) == list(range(len(groups)))
        degree = {rank: sum(rank in group for group in groups) for rank in range(ranks)}
        for number, one in enumerate(rounds):
            used = [rank for index in one for rank in groups[index]]
            assert len(used) == len(set(used))
            for index in one:
                assert number <= sum(degree[rank] - 1 for rank in groups[index])


def test_a_line_of_any_length_takes_two_rounds_each_way() -> None:
    for devices in (2, 3, 8, 100):
        line = sorted(pairwise(range(devices)))
        assert len(in_rounds(line)) == min(2, devices - 1)
        both = sorted([*line, *((b, a) for a, b in line)])
        assert len(in_rounds(both)) <= 7


@pytest.mark.parametrize("copies", [1, 2, 16, 128])
@pytest.mark.parametrize("name", ["1f1b", "chimera", "interleaved-1f1b"])
def test_rounds_do_not_grow_with_copies(name: str, copies: int) -> None:
    schedule = generate(name, Shape(devices=8, microbatches=8))
    whole = replicate(schedule, copies)
    one, all_of_them = (len(in_rounds(sorted(edges(s)))) for s in (schedule, whole))
    assert all_of_them == one
    groups = [tuple(ranks) for ranks in sum_groups(whole.placement).values()]
    assert len(in_rounds(groups)) <= 2  # the holders of a stage; Chimera's devices hold two


def test_connected_is_what_a_walk_finds() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        ranks = rng.randint(2, 20)
        joins = [tuple(rng.sample(range(ranks), 2)) for _ in range(rng.randint(0, 15))]
        near: dict[int, set[int]] = {}
        for a, b in joins:
            near.setdefault(a, set()).add(b)
            near.setdefault(b, set()).add(a)
        result, left = [], set(near)
        while left:
            reached, front = set(), {min(left)}
            while front:
                reached |= front
                front = {b for a in front for b in near[a]} - reached
            result.append(tuple(sorted(reached)))
            left -= reached
        assert connected(joins) == sorted(result)


@pytest.mark.parametrize(
    ("one_host", "tensor", "count"),
    [
        (True, 1, 1 + 4),  # the world, and the two holders of each of four stages
        (False, 1, 1 + 4 + 2),  # Gloo between hosts: one for each pipeline
        (False, 2, 1 + 2 * 4 + 8 + 4),  # for each tensor rank, and the tensor groups of eight devices
    ],
)
def test_groups_are_counted(one_host: bool, tensor: int, count: int) -> None:
    schedule = replicate(generate("1f1b", Shape(devices=4, microbatches=4)), 2)
    world = schedule.devices * tensor
    peers = tuple(Peer(r, "host" if one_host else f"host {r}", "cpu", f"rank {r}") for r in range(world))
    topology = Topology(
        peers=peers, rendezvous="tcp://127.0.0.1:1", edges=tensor_rank_edges(edges(schedule), tensor),
        groups=tensor_rank_groups(sum_groups(schedule.placement), schedule.devices, tensor),
        transport="auto", run_id="x",
    )  # fmt: skip
    assert topology.process_groups() == count


def test_a_users_setting_of_lazy_connections_wins(monkeypatch) -> None:
    monkeypatch.delenv(LAZY, raising=False)
    for lazily in (True, False):
        with connected_on_use(lazily):
            assert os.environ.get(LAZY) == ("1" if lazily else None)
        assert LAZY not in os.environ
    monkeypatch.setenv(LAZY, "0")
    with connected_on_use():
        assert os.environ[LAZY] == "0"
    assert os.environ[LAZY] == "0"
