"""One-way latency of the CPU channels by message size: ``python tests/bench/runtime/transport_latency.py``.

Two processes play ping-pong; one way is half a round trip. The kinds are interleaved block by block, so that a
slower minute of the machine hits both, and medians are over the blocks' medians. Also prints what a message costs each
side in processor time, by sending and receiving bursts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import uuid

import torch
import torch.distributed as dist

from raypipe.runtime.transport.channel import Expected, Label, Peer, Receiver, Sender, TensorSpec
from raypipe.runtime.transport.registry import open_channels

SIZES = {"4 KB": (4096, 200), "64 KB": (1 << 16, 100), "1 MB": (1 << 20, 30), "4 MB": (4 << 20, 15)}
PEERS = [Peer(0, "n0", "cpu", "stage 0"), Peer(1, "n0", "cpu", "stage 1")]


class Ends:
    def __init__(self, kind: str, rank: int, run_id: str) -> None:
        senders, receivers = open_channels(PEERS[rank], PEERS, [(0, 1), (1, 0)], kind, f"{run_id}-{kind}")
        self.out: Sender = senders[1 - rank]
        self.into: Receiver = receivers[1 - rank]
        self.step = 0


def ping_pong(ends: Ends, rank: int, nbytes: int, rounds: int) -> list[float]:
    """Seconds one way, for each round."""
    x = torch.zeros(nbytes // 4)
    spec = (TensorSpec(tuple(x.shape), x.dtype),)
    coming = [Label("act", 1 - rank, rank, 0, ends.step + i) for i in range(rounds)]
    going = [Label("act", rank, 1 - rank, 0, ends.step + i) for i in range(rounds)]
    ends.step += rounds
    ends.into.post([Expected(label, spec) for label in coming])
    times = []
    for there, back in zip(going, coming, strict=True):
        start = time.perf_counter()
        if rank == 0:
            ends.out.send(there, [x])
        (x,) = ends.into.recv(back, 60)
        if rank == 1:
            ends.out.send(there, [x])
        times.append((time.perf_counter() - start) / 2)
    ends.out.flush(60)
    return times


def burst(ends: Ends, rank: int, nbytes: int, count: int) -> float:
    """Processor seconds per message on this side; rank 0 sends, rank 1 receives when all have been sent."""
    x = torch.zeros(nbytes // 4)
    labels = [Label("act", 0, 1, i, ends.step) for i in range(count)]
    ends.step += 1
    start = time.thread_time()
    if rank == 0:
        for label in labels:
            ends.out.send(label, [x])
        cost = time.thread_time() - start
        dist.barrier()
    else:
        ends.into.post([Expected(label, (TensorSpec(tuple(x.shape), x.dtype),)) for label in labels])
        dist.barrier()
        start = time.thread_time()
        for label in labels:
            ends.into.recv(label, 60)
        cost = time.thread_time() - start
    dist.barrier()
    return cost / count


def run(rank: int, port: int, run_id: str, kinds: list[str], blocks: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ends = {kind: Ends(kind, rank, run_id) for kind in kinds}
    oneway: dict[str, list[float]] = {f"{kind} {size}": [] for kind in kinds for size in SIZES}
    for _ in range(blocks):
        for size, (nbytes, rounds) in SIZES.items():
            for kind in kinds:
                times = ping_pong(ends[kind], rank, nbytes, rounds)
                oneway[f"{kind} {size}"].append(statistics.median(times[rounds // 5 :]))
    costs: dict[str, list[float]] = {}
    for _ in range(5):
        for kind in kinds:
            costs.setdefault(kind, []).append(burst(ends[kind], rank, 4096, 100))
    result = {
        "oneway_s": {key: statistics.median(values) for key, values in oneway.items()},
        "cost_s": {kind: statistics.median(values) for kind, values in costs.items()},
    }
    print(json.dumps(result), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", default=["shm", "gloo"])
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--run-id", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank >= 0:
        run(args.rank, args.port, args.run_id, args.kinds, args.blocks)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rest = ["--port", str(port), "--run-id", uuid.uuid4().hex[:8], "--blocks", str(args.blocks), "--kinds", *args.kinds]
    ranks = [
        subprocess.Popen([sys.executable, __file__, "--rank", str(r), *rest], stdout=subprocess.PIPE, text=True)
        for r in (0, 1)
    ]
    sender, receiver = (json.loads(p.communicate(timeout=600)[0]) for p in ranks)
    print(f"{'one way, ms':14}" + "".join(f"{kind:>12}" for kind in args.kinds))
    for size in SIZES:
        print(f"{size:14}" + "".join(f"{sender['oneway_s'][f'{k} {size}'] * 1e3:12.4f}" for k in args.kinds))
    print("\nprocessor time per 4 KB message, us")
    for title, side in (("send", sender), ("recv", receiver)):
        print(f"{title:14}" + "".join(f"{side['cost_s'][k] * 1e6:12.1f}" for k in args.kinds))


if __name__ == "__main__":
    main()
