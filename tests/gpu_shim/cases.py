"""What runs over the shim, in processes of their own: ``python -m tests.gpu_shim.cases NAME``, which prints JSON.

``LD_LIBRARY_PATH`` has the shim's libraries, and the interpreter torch's CUDA build (``tests/gpu_shim/shim.py``).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing as multiprocessing

from raypipe.errors import RaypipeError, TransportError
from raypipe.models.host_copies import STREAMS
from raypipe.runtime.process.set_up import set_up_cuda
from raypipe.runtime.setup.communicators import Communicators, Location, Node, Topology, locate, rendezvous_of
from raypipe.runtime.transport.channel import Expected, Label, TensorSpec

TIMEOUT_S = 8.0
"""The message timeout of the cases."""
HERE = Node("node", "127.0.0.1")


def taken_bytes(gpu: int = 0) -> int:
    """Return what all processes have taken of a GPU."""
    library = ctypes.CDLL("libcudart.so.13")  # the one that torch has loaded
    library.gpu_shim_taken.restype = ctypes.c_long
    return int(library.gpu_shim_taken(gpu))


def nccl_counts() -> dict[str, int]:
    """What became of this process's communicators."""
    library = ctypes.CDLL("libnccl.so.2")
    return {name: getattr(library, f"gpu_shim_nccl_{name}")() for name in ("aborts", "destroys", "open", "most_ctas")}


def topology(locations: list[Location], edges: Any, groups: Any = None, timeout_s: float = TIMEOUT_S) -> Topology:
    return Topology(
        peers=tuple(at.peer for at in locations), rendezvous=rendezvous_of(locations), edges=tuple(edges),
        groups=groups or {}, transport="auto", run_id="shim", timeout_s=timeout_s,
    )  # fmt: skip


def meet(rank: int, device: torch.device, ends: Any, heard: Any) -> list[Location]:
    """Set this process up for its GPU, tell the others where it is, and return where all are."""
    set_up_cuda()
    here = locate(rank, f"stage {rank}", device, HERE)
    for end in ends:
        end.send(here)
    return sorted((end.recv() for end in heard), key=lambda at: at.peer.rank)


def worker(rank: int, count: int, edges: Any, groups: Any, body: str, pipes: Any, said: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    device = torch.device("cuda", 0)
    locations = meet(rank, device, pipes, said)
    opened = Communicators(rank, topology(locations, edges, groups), "nccl", HERE.address)
    globals()[body](rank, opened, device)


def together(count: int, edges: Any, body: str, groups: Any = None) -> dict[int, Any]:
    """Run ``body(rank, communicators, device)`` in as many processes; return each one's exit code."""
    context = multiprocessing.get_context("spawn")
    table = [[context.Pipe() for _ in range(count)] for _ in range(count)]
    started = []
    for rank in range(count):
        pipes, said = [table[rank][k][1] for k in range(count)], [table[k][rank][0] for k in range(count)]
        one = context.Process(target=worker, args=(rank, count, edges, groups, body, pipes, said))
        one.start()
        started.append(one)
    until = time.monotonic() + 60
    for one in started:
        one.join(max(0.1, until - time.monotonic()))
        if one.is_alive():
            one.kill()
            one.join()
    return {rank: one.exitcode for rank, one in enumerate(started)}


def say(**found: Any) -> None:
    # In one write: several processes share the pipe.
    os.write(sys.stdout.fileno(), f"{json.dumps(found)}\n".encode())


def exchange(rank: int, opened: Communicators, device: torch.device) -> None:
    """Ten messages each way, and an orderly end."""
    peer, x = 1 - rank, torch.ones(1000, device=device)
    labels = [Label("act", rank, peer, n, 0) for n in range(10)]
    opened.receivers[peer].post(
        [Expected(Label("act", peer, rank, n, 0), (TensorSpec((1000,), torch.float32),)) for n in range(10)]
    )
    for n, label in enumerate(labels):
        opened.senders[peer].send(label, [x])
        (came,) = opened.receivers[peer].recv(Label("act", peer, rank, n, 0), TIMEOUT_S)
        assert came.shape == (1000,)
    torch.cuda.synchronize()
    opened.senders[peer].flush(TIMEOUT_S)
    opened.close()
    say(rank=rank, **nccl_counts())


def lost_in_a_sum(rank: int, opened: Communicators, device: torch.device) -> None:
    """Rank 1 is killed; rank 0 has a sum with it under way, leaves, and goes on."""
    import torch.distributed as dist

    if rank == 1:
        os._exit(9)
    dist.all_reduce(torch.ones(4, device=device), group=opened.groups["both"], async_op=True)
    time.sleep(TIMEOUT_S + 3.0)  # the watchdog would end the process about now
    began = time.monotonic()
    opened.leave()
    took_s = time.monotonic() - began
    torch.cuda.synchronize()
    say(rank=rank, left_s=took_s, works=float(torch.zeros(1, device=device).cpu()) == 0.0, **nccl_counts())


def silent_peer(rank: int, opened: Communicators, device: torch.device) -> None:
    """Rank 1 sends nothing: rank 0 has an error with a name within the timeout, and ends."""
    if rank == 1:
        time.sleep(TIMEOUT_S + 2)
        os._exit(0)
    wanted = Label("act", 1, 0, 7, 0)
    opened.receivers[1].post([Expected(wanted, (TensorSpec((4,), torch.float32),))])
    began = time.monotonic()
    try:
        opened.receivers[1].recv(wanted, TIMEOUT_S)
    except TransportError as error:
        said = str(error)
    took_s = time.monotonic() - began
    opened.leave()
    say(said=said, took_s=took_s, timeout_s=TIMEOUT_S, left_s=time.monotonic() - began - took_s)


def opened_again(rank: int, opened: Communicators, device: torch.device) -> None:
    """A side stream for each of 40 openings of the same edge: torch gives the 33rd the first one's again."""
    from raypipe.runtime.transport.gpu.side_stream import CopyStream
    from raypipe.runtime.update.side_stream import make_stream

    second = make_stream(device)
    edges = [CopyStream(device, "to 1").stream for _ in range(2 * STREAMS)]
    say(same=all(edge == edges[0] for edge in edges), alias=any(edge == second for edge in edges))


def memory(rank: int, opened: Communicators, device: torch.device) -> None:
    """What the GPU has taken, by its own count, before a tensor of three 20 MiB segments, with it and after it."""
    torch.cuda.mem_get_info()
    before = taken_bytes()
    x = torch.empty(60 << 20, dtype=torch.uint8, device=device)
    held, grows = taken_bytes(), torch.cuda.memory_snapshot()[0]["is_expandable"]
    del x
    torch.cuda.empty_cache()
    loading = os.environ["CUDA_MODULE_LOADING"]
    say(before=before, held=held, after=taken_bytes(), grows=grows, cuda_module_loading=loading)


def killed(rank: int, opened: Communicators, device: torch.device) -> None:
    """Rank 1 is killed when it has 60 MiB of its GPU; rank 0 looks at that GPU until nothing is taken of it."""
    if rank == 1:
        x = torch.empty(60 << 20, dtype=torch.uint8, device=device)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
        del x
    most = left = taken_bytes(1)
    until = time.monotonic() + 20.0
    while time.monotonic() < until and not (most > 60 << 20 and left == 0):
        most, left = max(most, left), taken_bytes(1)
        time.sleep(0.02)
    say(most=most, left=left)


def reserves_none(rank: int, opened: Communicators, device: torch.device) -> None:
    """An actor that reserves no GPU becomes a worker on a node that has one."""
    import ray

    from raypipe.runtime.hosts.devices import DeviceRequest
    from raypipe.runtime.hosts.reserve import reserve
    from raypipe.runtime.worker.worker_group import Places, StageStandby
    from tests.ray_environment import start_ray

    start_ray(2, forks=False)
    places = Places(reserve(1, DeviceRequest(cpus=1.0, gpus=0.0), 60.0), [0], StageStandby)
    actor = ray.remote(StageStandby).options(**places.options(0, "waiting")).remote()
    actor.become.remote(0, "stage 0")
    say(device=ray.get(actor.locate.remote()).peer.device, gpus=ray.cluster_resources().get("GPU"))
    ray.shutdown()


def broken(rank: int, opened: Communicators, device: torch.device) -> None:
    """A worker whose step breaks its GPU's context is asked to leave its plan for the next one."""
    from raypipe.runtime.worker.worker import StageWorker

    class Breaks(StageWorker):
        def run_step(self, *_: Any) -> Any:
            ctypes.CDLL("libcudart.so.13").gpu_shim_break()
            return torch.ones(1, device=self.device).cpu()

    worker = Breaks(rank, "stage 0")
    worker.setup_data = mock.Mock()
    worker.setup_data.job.train.elastic = None  # it parts from no others
    said = ["", ""]
    calls: tuple[Callable[[], object], ...] = (partial(worker.run_steps, 0), worker.leave)
    for n, call in enumerate(calls):
        try:
            call()
        except RaypipeError as error:
            said[n] = str(error)
    say(said=said)


def attention(rank: int, opened: Communicators, device: torch.device) -> None:
    """The attention of a slice, forward and backward: its kernel, and its temporary memory over that of all scores."""
    from raypipe.compat.attention import fused_kernel, piece_attention, piece_gradients

    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        q, k, v, gradient = (torch.zeros(1, 8, 2048, 64, dtype=dtype, device=device) for _ in range(4))
        before, scores = torch.cuda.memory_allocated(), 8 * 2048 * 2048 * dtype.itemsize
        torch.cuda.reset_peak_memory_stats()
        out, lse = piece_attention(q, k, v, True, None, None)
        piece_gradients(gradient, q, k, v, out, lse, True, None, None)
        share = (torch.cuda.max_memory_allocated() - before) / scores
        found[str(dtype)] = [fused_kernel(q, k, v, True), share]
    say(**found)


BOTH_WAYS = ((0, 1), (1, 0))
CASES: dict[str, tuple[int, Any, Any]] = {
    "exchange": (2, BOTH_WAYS, None),
    "lost_in_a_sum": (2, (), {"both": (0, 1)}),
    "silent_peer": (2, BOTH_WAYS, None),
    "opened_again": (1, (), None),
    "memory": (1, (), None),
    "killed": (2, (), None),
    "reserves_none": (1, (), None),
    "broken": (1, (), None),
    "attention": (1, (), None),
}

if __name__ == "__main__":
    count, edges, groups = CASES[sys.argv[1]]
    say(exits=together(count, edges, sys.argv[1], groups))
