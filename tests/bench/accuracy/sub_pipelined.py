"""Sub-pipelined tensor parallelism against Merak's formula.

Run: `python -m tests.bench.accuracy.sub_pipelined [--layers K] [--compute-ms T_m]`.

One member of a tensor group runs its blocks with the real executor: the real order of products, copies and sums,
forward and backward. Compute is a timed wait in each half of a block (attention, MLP), backward twice as long; a sum
over the group is a message on an emulated link that carries one at a time. Both last in proportion to the rows.
Merak, section 5.3: (3 T_m + 2 T_a) K without halves, 3/4 T_m + 1/2 T_a + (K - 1/4) max(3 T_m, 2 T_m + T_a, 2 T_a)
with two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from raypipe.job import GptSpec
from raypipe.models import GptLayers
from raypipe.schedule.forms.text import from_text
from raypipe.schedule.lowering.programs import programs
from raypipe.schedule.passes import add_updates
from raypipe.tensor import Division, SoloGroup, group_of_thread
from raypipe.tensor.divide import RowParallel
from tests.bench.command import options
from tests.runtime.runs.one_device import Fixed, executor_of

ROWS, SEQUENCE = 4, 8
RATIOS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
CPU = torch.device("cpu")


class Link(SoloGroup):
    """The member's way to the others: a sum of the whole stream takes ``seconds``, and one goes after the other."""

    size = 2

    def __init__(self, seconds: float) -> None:
        self.seconds, self.free_at = seconds, 0.0

    def start_all_reduce(self, x: Tensor, operation: str = "sum") -> Callable[[], object]:
        if x.dim() < 3:  # the loss's few numbers
            return lambda: None
        self.free_at = end = max(time.monotonic(), self.free_at) + self.seconds * x.shape[0] / ROWS
        return lambda: time.sleep(max(0.0, end - time.monotonic()))


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds * x.shape[0] / ROWS
        time.sleep(ctx.seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


def measure(layers: int, compute_s: float, sums_s: float, halves: bool) -> tuple[float, float]:
    """Seconds of forward and backward of ``layers`` blocks, each with ``compute_s`` and ``sums_s`` forward."""
    spec = GptSpec(layers=layers, hidden=16, heads=2, sequence=SEQUENCE, vocabulary=256)
    model = GptLayers(spec, torch.float32, Division(2, 0))
    cut = [range(1), range(1, layers + 1), range(layers + 1, layers + 2)]
    schedule = add_updates(from_text("device 0: 0F0 1F0 2F0 2BW0 1BW0 0BW0"))
    tokens = torch.zeros(ROWS, SEQUENCE, dtype=torch.int64)
    data = Fixed({"input_ids": tokens, "shift_labels": tokens})
    executor = executor_of(
        model, cut, schedule, data, None, batch=ROWS, microbatch=ROWS, dtype=torch.float32, tied=False,
        sub_pipelined=halves,
    )  # fmt: skip
    for block in executor.modules[1, 0].modules():
        if isinstance(block, RowParallel):
            block.register_forward_pre_hook(lambda _m, args: (_Timed.apply(args[0], compute_s / 2),))
    (program,) = programs(schedule)
    result: list[tuple[float, float]] = []
    with group_of_thread(Link(sums_s / 2)):
        for step in range(4):
            times = executor.run(program, step, 0.0).times
            spans = {(a.task.stage, a.task.kind): float(end - start)
                     for a, (start, end) in zip(program.actions, times, strict=True)}  # fmt: skip
            result.append((spans[(1, "F")], spans[(1, "BW")]))
    return median(f for f, _ in result[1:]), median(b for _, b in result[1:])


def formula(layers: int, compute_s: float, sums_s: float, halves: bool) -> float:
    """Merak's cost of one micro-batch, forward and backward."""
    if not halves:
        return (3 * compute_s + 2 * sums_s) * layers
    longest = max(3 * compute_s, 2 * compute_s + sums_s, 2 * sums_s)
    return 0.75 * compute_s + 0.5 * sums_s + (layers - 0.25) * longest


def main() -> None:
    """Print the table."""
    asked = options(__doc__, layers=4, compute_ms=40.0)
    torch.set_num_threads(1)
    compute = asked.compute_ms / 1e3
    print(f"K = {asked.layers} layers, T_m = {asked.compute_ms:g} ms; milliseconds of one micro-batch")
    bare = [sum(measure(asked.layers, 0.0, 0.0, halves)) for halves in (False, True)]
    print(f"beside all waits the blocks themselves take {1e3 * bare[0]:.0f} ms whole, {1e3 * bare[1]:.0f} ms in halves")
    print("T_a/T_m   whole: measured  formula    halves: measured  formula      gain  by formula")
    for ratio in RATIOS:
        whole, halves = (sum(measure(asked.layers, compute, ratio * compute, way)) for way in (False, True))
        expected = [formula(asked.layers, compute, ratio * compute, way) for way in (False, True)]
        times = "".join(f"{1e3 * t:{width}.0f}" for t, width in zip(
            (whole, expected[0], halves, expected[1]), (18, 9, 19, 9), strict=True))  # fmt: skip
        print(f"{ratio:7.2f}{times}   {whole / halves:7.2f}x {expected[0] / expected[1]:10.2f}x")


if __name__ == "__main__":
    main()
