"""A device that leaves its groups holds nobody up, whatever it has under way with them."""

from __future__ import annotations

import multiprocessing
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raypipe.runtime.recovery.replacement import leave

TIMEOUT_S = 20.0


def member(rank: int, file: Path, sums_first: bool, waited: Any) -> None:
    """Rank 0 leaves two groups, with a sum under way on one; rank 1 never joins that, and receives on the other."""
    timeout = timedelta(seconds=TIMEOUT_S)
    store = dist.FileStore(str(file), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    sums, messages = (dist.new_group([0, 1], timeout=timeout) for _ in range(2))
    if rank == 0:
        dist.all_reduce(torch.ones(4), group=sums, async_op=True)
        held = [sums, messages] if sums_first else [messages, sums]
        del sums, messages
        dist.destroy_process_group()
        mine: Any = SimpleNamespace(leave=lambda: [held.pop(0), held.pop(0)])
        nothing: Any = SimpleNamespace(leave=list)
        leave(nothing, mine)
        time.sleep(2 * TIMEOUT_S)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        dist.recv(torch.ones(4), 0, group=messages)
    waited.put(time.monotonic() - began)


@pytest.mark.parametrize("sums_first", [False, True])
def test_a_group_with_a_sum_under_way_keeps_no_other_from_going(tmp_path: Path, sums_first: bool) -> None:
    context = multiprocessing.get_context("spawn")
    waited = context.Queue()
    given = (tmp_path / "store", sums_first, waited)
    members = [context.Process(target=member, args=(rank, *given), daemon=True) for rank in range(2)]
    for process in members:
        process.start()
    try:
        assert waited.get(timeout=60.0) < TIMEOUT_S / 2
    finally:
        for process in members:
            process.kill()
