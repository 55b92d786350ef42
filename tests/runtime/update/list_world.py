"""Ranks that exchange one number each, in lists and directly. Not a test file: test_norm.py runs it.

``python list_world.py RANK RANKS STORE``
"""

from __future__ import annotations

import os
import random
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from raypipe.errors import TransportError
from raypipe.runtime.update.norm import Shares


def main(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    world = dist.group.WORLD
    lists, direct = Shares(world, one_hop=1), Shares(world, one_hop=ranks)
    rng = random.Random(5)
    for turn in range(20):
        numbers = [rng.uniform(0, 10) ** rng.randint(-9, 9) for _ in range(ranks)]
        if turn % 5 == rank % 5:
            time.sleep(0.02)  # one is late, another comes with it
        lists.start(numbers[rank])
        assert lists.wait(lambda: False) == numbers
        assert lists.ready()
        direct.start(numbers[rank])
        assert direct.wait(lambda: False) == numbers
    dist.barrier()
    if rank == ranks - 1:
        os._exit(0)  # one is lost
    lists.start(1.0)
    with pytest.raises(TransportError, match="global gradient norm"):
        lists.wait(lambda: False)
    print("told", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
