"""Opening all channels and groups of a run."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch.distributed as dist

from raypipe.errors import SpecError, TransportError
from raypipe.runtime.transport.channel import Peer
from raypipe.runtime.transport.process_groups import create_groups
from raypipe.runtime.transport.registry import open_channels

A, B = Peer(0, "n", "cpu", "stage 0"), Peer(1, "n", "cpu", "stage 1")


@pytest.mark.slow
def test_four_ranks_all_to_all_over_two_kinds_of_channel(tmp_path: Path) -> None:
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    command = [sys.executable, str(Path(__file__).with_name("mesh_world.py"))]
    ranks = [
        subprocess.Popen(
            [*command, str(r), str(tmp_path / "store"), run_id],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(4)
    ]
    try:
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=90)
            assert out == "fine\n", f"rank {rank}:\n{err[-3000:]}"
    finally:
        for process in ranks:
            process.kill()


def test_no_edges_need_nothing() -> None:
    assert open_channels(A, [A], [], "auto", "unused") == ({}, {})


@pytest.mark.parametrize("edge", [(0, 0), (0, 7)])
def test_an_edge_that_makes_no_sense(edge: tuple[int, int]) -> None:
    with pytest.raises(TransportError, match=f"edge {edge[0]} -> {edge[1]}"):
        open_channels(A, [A, B], [edge], "auto", "unused")


def test_a_request_that_cannot_be_served_is_refused_before_anything_opens() -> None:
    with pytest.raises(SpecError, match="nccl can't serve"):
        open_channels(A, [A, B], [(0, 1)], "nccl", "unused")


def test_a_device_that_never_comes_is_named() -> None:
    run_id = f"test-{uuid.uuid4().hex[:8]}"
    with pytest.raises(TransportError, match=r"stage 1 \(rank 1\): no connection within 0\.05 s"):
        open_channels(A, [A, B], [(0, 1), (1, 0)], "shm", run_id, timeout_s=0.05)


@pytest.mark.parametrize("ranks", [(), (0, 0), (0, 1), (-1,)])
def test_groups_that_cannot_be(ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(TransportError, match="group tied: ranks"):
        create_groups({"tied": ranks}, "gloo")
