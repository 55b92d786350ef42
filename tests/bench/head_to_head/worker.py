"""A rival's process: waits for orders on a socket, asleep, and runs one block for each.

Started by torchrun for several processes, or alone: ``python -m tests.bench.head_to_head.worker SOCKET``.
"""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import replace
from multiprocessing.connection import Client

import torch
import torch.distributed as dist

from tests.bench.head_to_head.rivals import Order, RankReport, forget_peak, peak_bytes
from tests.bench.head_to_head.torch_side import (
    accumulate_steps,
    data_parallel_steps,
    divided_experts_steps,
    sharded_steps,
)


def run(order: Order) -> RankReport:
    gc.collect()  # what the block before left is not collected in this one's time
    forget_peak()
    return replace(_run(order), peak_bytes=peak_bytes())


def _run(order: Order) -> RankReport:
    if order.kind == "deepspeed":
        from tests.bench.head_to_head.peers_side import deepspeed_steps

        return deepspeed_steps(order)
    if order.kind == "accelerate":
        from tests.bench.head_to_head.peers_side import accelerate_steps

        return accelerate_steps(order)
    if order.kind == "pipeline":
        from tests.bench.head_to_head.torch_side import pipeline_steps

        return pipeline_steps(order)
    if order.kind == "ddp":
        return data_parallel_steps(order)
    if order.kind == "ep":
        return divided_experts_steps(order)
    if order.kind == "fsdp2":
        return sharded_steps(order)
    return accumulate_steps(order)


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo")
    with Client(sys.argv[1], family="AF_UNIX") as link:
        link.send(rank)
        while (order := link.recv()) is not None:
            try:
                link.send(run(order))
            except Exception as error:
                link.send(error)
                raise
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
