"""Where devices meet: addresses of both kinds."""

from __future__ import annotations

import pytest
import torch

from raypipe.errors import ClusterError
from raypipe.runtime.setup.communicators import (
    Location,
    Node,
    _address_of,
    check_devices,
    locate,
    rendezvous_of,
    sharers,
)
from raypipe.runtime.transport.channel import Peer


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1"])
def test_the_rendezvous_is_rank_0s_address(address) -> None:
    places = [Location(Peer(rank, "node", "cpu", f"stage {rank}"), address, 4000 + rank, 1) for rank in range(2)]
    assert _address_of(rendezvous_of(places)) == (address, 4000)


def at(rank: int, device: str, model: str = "") -> Location:
    return Location(Peer(rank, "node", device, f"stage {rank}"), "10.0.0.1", 4000 + rank, 1, model)


def test_devices_that_cannot_be_joined_are_refused_by_name() -> None:
    gpus = [at(rank, f"cuda:{rank}", "NVIDIA H100") for rank in range(2)]
    slices = [at(rank, f"cuda:{rank}", "NVIDIA A100-SXM4-40GB MIG 1g.5gb") for rank in range(2)]
    for works in (gpus, slices[:1], [at(0, "cpu"), at(1, "cpu")], [gpus[0], at(1, "cuda:1", "NVIDIA A100")]):
        check_devices(works)
    with pytest.raises(ClusterError, match="stage 1: torch finds no GPU there"):
        check_devices([gpus[0], at(1, "cpu")])
    with pytest.raises(ClusterError, match=r"stage 0.*MIG"):
        check_devices(slices)


def test_a_torch_for_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ClusterError, match="ROCm"):
        locate(0, "stage 0", torch.device("cuda", 0), Node("node", "127.0.0.1"))


def test_workers_on_one_gpu_are_told_from_those_with_a_gpu_each() -> None:
    """Each has its share of the memory of what it is on; GPUs of another node may have the same name."""
    there = Location(Peer(3, "another node", "cuda:a", "stage 3"), "10.0.0.2", 4003, 1)
    assert sharers([at(0, "cuda:a"), at(1, "cuda:a"), at(2, "cuda:b"), there]) == [2, 2, 1, 1]
