"""A device that leaves its groups holds nobody up, whatever it has under way with them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raypipe.errors import TransportError
from raypipe.runtime.recovery.replacement import leave, parts_when_lost
from raypipe.runtime.setup.communicators import Communicators, Topology
from raypipe.runtime.transport.channel import Expected, Label, Peer, TensorSpec

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


def waits_for(member: Callable[..., None], ranks: int, *given: Any) -> float:
    """Run so many members in processes of their own; return the seconds that one of them says it waited."""
    context = multiprocessing.get_context("spawn")
    waited = context.Queue()
    members = [context.Process(target=member, args=(rank, *given, waited), daemon=True) for rank in range(ranks)]
    for process in members:
        process.start()
    try:
        return waited.get(timeout=60.0)
    finally:
        for process in members:
            process.kill()


@pytest.mark.parametrize("sums_first", [False, True])
def test_a_group_with_a_sum_under_way_keeps_no_other_from_going(tmp_path: Path, sums_first: bool) -> None:
    assert waits_for(member, 2, tmp_path / "store", sums_first) < TIMEOUT_S / 2


MESSAGE = Label("act", 0, 1, 0, 0)
EXPECTED = Expected(MESSAGE, (TensorSpec((4,), torch.float32),))


@parts_when_lost
def receive(worker: Any, source: int) -> None:
    """Receive a message."""
    receiver = worker.communicators.receivers[source]
    receiver.post([EXPECTED])
    receiver.recv(MESSAGE, TIMEOUT_S)


def neighbour(rank: int, port: int, frozen: bool, waited: Any) -> None:
    """Rank 2 dies; rank 0 waits for it, and leaves; rank 1 waits for rank 0, on the same group."""
    peers = tuple(Peer(one, "here", "cpu") for one in range(3))
    topology = Topology(peers, f"tcp://127.0.0.1:{port}", ((2, 0), (0, 1)), {}, "gloo", f"left-{port}", TIMEOUT_S)
    communicators = Communicators(rank, topology, "gloo", "127.0.0.1")
    if rank == 2:
        time.sleep(1.0)  # the others wait by then
        os._exit(0)
    train: Any = SimpleNamespace(elastic=None)
    worker: Any = SimpleNamespace(
        apart=False,
        broken=False,
        device=torch.device("cpu"),
        setup_data=SimpleNamespace(job=SimpleNamespace(train=train)),
        communicators=communicators,
    )

    def part() -> None:
        leave(SimpleNamespace(leave=list), communicators)  # type: ignore[arg-type]
        if not frozen:
            time.sleep(2 * TIMEOUT_S)  # whoever called still has the error

    worker.part = part if rank == 0 else lambda: None
    if frozen:
        gc.collect()
        gc.freeze()
    began = time.monotonic()
    with pytest.raises(TransportError, match="connection lost"):
        receive(worker, 2 if rank == 0 else 0)
    if rank == 1:
        waited.put(time.monotonic() - began)
    time.sleep(2 * TIMEOUT_S)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_error_of_a_failed_wait_keeps_no_channel_open(frozen: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert waits_for(neighbour, 3, port, frozen) < TIMEOUT_S / 2
