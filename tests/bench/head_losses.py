"""The loss of a linear head in chunks: raypipe's beside ``torch.nn.functional.linear_cross_entropy`` (torch 2.13).

Run: ``python -m tests.bench.head_losses [--in-flight N]``. A micro-batch of 1,024 tokens, 256 wide, with 16,384
classes, on one core in float32. Printed are seconds of forward and backward of a micro-batch, and the most bytes that
torch's allocator hands out at a time, beside inputs, weight and its gradient, with N micro-batches in flight.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from raypipe.runtime.backward.chunked_loss import ChunkedHead
from raypipe.runtime.backward.deferred import WeightQueue

TOKENS, WIDTH, CLASSES, CHUNK = 1024, 256, 16384, 256
REPEATS = 3
Loss = Callable[[Tensor, nn.Parameter, Tensor], Tensor]


def whole(hidden: Tensor, weight: nn.Parameter, labels: Tensor) -> Tensor:
    """The loss with all logits at once."""
    return F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")


def ours(hidden: Tensor, weight: nn.Parameter, labels: Tensor) -> Tensor:
    """Raypipe's, as a joint backward runs it."""
    return ChunkedHead(hidden, weight, None, CHUNK, WeightQueue(), False).cross_entropy(labels, None, 0.0)


def torchs(hidden: Tensor, weight: nn.Parameter, labels: Tensor) -> Tensor:
    """torch's, in chunks as large."""
    options = vars(torch.nn)["LinearCrossEntropyOptions"](batch_chunk_size=CHUNK, chunking_method=None)
    result: Tensor = vars(F)["linear_cross_entropy"](hidden, weight, labels, reduction="sum", options=options)
    return result


def most_bytes(run: Callable[[], object]) -> int:
    """Return the most that is handed out at a time beside what was there before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    now = most = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def measured(loss: Loss, in_flight: int) -> tuple[float, int, int]:
    """Return the seconds of a micro-batch, and the bytes of one and of several in flight."""
    draw = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(CLASSES, WIDTH, generator=draw) / WIDTH**0.5)
    weight.grad = torch.zeros_like(weight)
    labels = torch.randint(CLASSES, (TOKENS,), generator=draw)
    inputs = [torch.randn(TOKENS, WIDTH, generator=draw, requires_grad=True) for _ in range(in_flight)]

    def run(count: int) -> None:
        for made in [loss(hidden, weight, labels) for hidden in inputs[:count]]:
            made.backward()
        for hidden in inputs:
            hidden.grad = None

    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run(1)
        taken.append(time.perf_counter() - began)
    return median(taken), most_bytes(lambda: run(1)), most_bytes(lambda: run(in_flight))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=4)
    count = parser.parse_args().in_flight
    torch.set_num_threads(1)
    ways: dict[str, Loss] = {"whole logits": whole, "raypipe, in chunks": ours}
    if hasattr(F, "linear_cross_entropy"):
        ways["torch, in chunks"] = torchs
    for name, loss in ways.items():
        seconds, one, some = measured(loss, count)
        print(f"{name:20s} {seconds:.2f} s  {one / 2**20:5.0f} MiB, {count} in flight {some / 2**20:5.0f} MiB")


if __name__ == "__main__":
    main()
