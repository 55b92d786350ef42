"""Four ranks open a mesh and gradient groups. Not a test file: test_mesh.py runs it.

``python mesh_world.py RANK STORE RUN_ID``: every rank sends to every other, over shared memory inside a "node" and Gloo
between the two; then sums within its groups.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from raypipe.runtime.transport.channel import Expected, Label, Peer, TensorSpec
from raypipe.runtime.transport.process_groups import create_groups
from raypipe.runtime.transport.registry import open_channels

WORLD = 4
PEERS = [Peer(rank, "left" if rank < 2 else "right", "cpu", f"stage {rank}") for rank in range(WORLD)]
EDGES = [(a, b) for a in range(WORLD) for b in range(WORLD) if a != b and (a, b) != (3, 0)]


def main(rank: int, store: str, run_id: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    # Order and repeats of the edges, and the order of the groups' names, differ between ranks.
    edges = EDGES[rank:] + EDGES[:rank] + EDGES[:2]
    senders, receivers = open_channels(PEERS[rank], PEERS[::-1], edges, "auto", run_id, timeout_s=30)
    assert sorted(senders) == [b for a, b in sorted(EDGES) if a == rank]
    assert sorted(receivers) == [a for a, b in sorted(EDGES) if b == rank]
    kinds = {other: type(receiver).__name__ for other, receiver in receivers.items()}
    for other, kind in kinds.items():
        assert kind == ("ShmReceiver" if PEERS[other].node == PEERS[rank].node else "GlooReceiver"), kinds
    x = torch.arange(50_000.0)
    for other, receiver in receivers.items():
        receiver.post(
            [Expected(Label("act", other, rank, mb, 0), (TensorSpec((50_000,), x.dtype),)) for mb in range(5)]
        )
    for mb in range(5):
        for other, sender in senders.items():
            sender.send(Label("act", rank, other, mb, 0), [x + 10 * rank + mb])
    for mb in range(5):
        for other, receiver in receivers.items():
            assert torch.equal(receiver.recv(Label("act", other, rank, mb, 0), 30)[0], x + 10 * other + mb)
    for sender in senders.values():
        sender.flush(30)

    wanted = {"tied": (0, 3), "pipe 0": (0, 1), "pipe 1": (2, 3), "twin": (1, 0), "world": range(WORLD)}
    names = list(wanted)[rank:] + list(wanted)[:rank]
    groups = create_groups({name: tuple(wanted[name]) for name in names}, "gloo")
    assert set(groups) == {name for name, ranks in wanted.items() if rank in ranks}
    for name in sorted(groups):
        total = torch.tensor([rank])
        dist.all_reduce(total, group=groups[name])
        assert total.item() == sum(wanted[name]), name
    dist.barrier()
    for channel in [*senders.values(), *receivers.values()]:
        channel.close()
    print("fine", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:4])
