"""What the end of a step costs a stage: squared norm and optimizer, as they are and as they might be.

    python -m tests.bench.runtime.update_cost [--turns 41] [--compiled]

Stages of a GPT, float32, AdamW, one thread; medians of turns. ``today`` is one fused kernel call over the stage's
tensors, and a norm per tensor; ``flat`` the same kernels over one flat tensor of parameters and one of gradients, the
least that fusing could cost without Inductor; with ``--compiled`` also Inductor over the flat tensors. ``first`` is how
the first micro-batch's weight gradients come to be: as results of their products (today, where nothing is summed over
copies), added to zeros in flat buckets (today, where it is), or written into memory that is there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from raypipe.job import GptSpec
from raypipe.job.train_spec import TrainSpec
from raypipe.models import GptLayers
from raypipe.runtime.process.set_up import set_up_process
from raypipe.runtime.update.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, buckets_of
from raypipe.runtime.update.optimizer import make_optimizer

STAGES = {"small": (64, 2, 64), "large": (256, 2, 512), "wide": (768, 3, 512)}
"""Hidden size, blocks, and tokens of a micro-batch."""


def medians(ways: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Microseconds of each way; they take turns, the first three of which warm up."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns + 3):
        for way, run in ways.items():
            began = time.perf_counter()
            run()
            taken[way].append(time.perf_counter() - began)
    return {way: median(times[3:]) * 1e6 for way, times in taken.items()}


def norm_squared(gradients: list[Tensor]) -> Tensor:
    """As ``GradientSync`` computes it."""
    return torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).double().square().sum()


def updates(parameters: list[nn.Parameter], compiled: bool) -> dict[str, Callable[[], object]]:
    """Ways to compute the squared norm and to update."""
    train = TrainSpec(steps=1, batch=8)
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
    for p in (*parameters, flat):
        p.grad = torch.randn_like(p)
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat_gradient = flat.grad
    assert flat_gradient is not None
    ways: dict[str, Callable[[], object]] = {
        "norm today": lambda: norm_squared(gradients), "norm flat": lambda: norm_squared([flat_gradient]),
        "step today": make_optimizer(train, {str(i): p for i, p in enumerate(parameters)}).step,
        "step flat": make_optimizer(train, {"flat": flat}).step,
    }  # fmt: skip
    if compiled:
        first, second, count = torch.zeros_like(flat), torch.zeros_like(flat), torch.ones(())
        rate, (beta1, beta2), decay, eps = train.lr, train.betas, train.weight_decay, train.eps

        def adamw(p: Tensor, g: Tensor, first: Tensor, second: Tensor, count: Tensor) -> None:
            a, b = first.lerp(g, 1 - beta1), beta2 * second + (1 - beta2) * g * g
            size = rate / (1 - beta1**count)
            p.copy_(p * (1 - rate * decay) - size * a / ((b / (1 - beta2**count)).sqrt() + eps))
            first.copy_(a)
            second.copy_(b)

        step: Any = torch.compile(adamw, fullgraph=True)
        norm: Any = torch.compile(lambda g: g.double().square().sum(), fullgraph=True)
        ways["norm Inductor"] = lambda: norm(flat.grad)
        ways["step Inductor"] = torch.no_grad()(lambda: step(flat, flat.grad, first, second, count))
    return ways


def first_gradients(parameters: list[nn.Parameter], tokens: int) -> dict[str, Callable[[], object]]:
    """Ways in which the matrices' first gradients come to be."""
    matrices = [p for p in parameters if p.dim() == 2]
    factors = [(torch.randn(p.shape[0], tokens), torch.randn(tokens, p.shape[1])) for p in matrices]
    buckets = buckets_of(matrices, FIRST_BUCKET_BYTES, BUCKET_BYTES)
    views = [torch.empty(p.shape) for p in matrices]

    def fresh() -> None:
        for p, (a, b) in zip(matrices, factors, strict=True):
            p.grad = a.mm(b)
        for p in matrices:
            p.grad = None

    def added() -> None:
        for bucket in buckets:
            bucket.open()
        for p, (a, b) in zip(matrices, factors, strict=True):
            assert p.grad is not None
            p.grad.addmm_(a, b)
        for bucket in buckets:
            bucket.close()

    def written() -> None:
        for view, (a, b) in zip(views, factors, strict=True):
            torch.mm(a, b, out=view)

    return {"first result": fresh, "first added": added, "first written": written}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=41)
    parser.add_argument("--compiled", action="store_true")
    asked = parser.parse_args()
    set_up_process(torch.device("cpu"))
    for name, (hidden, blocks, tokens) in STAGES.items():
        model = GptLayers(GptSpec(layers=blocks, hidden=hidden, heads=4, sequence=32, vocabulary=256), torch.float32)
        parameters = [p for layer in range(1, 1 + blocks) for p in model.build(layer, 0).parameters()]
        ways = updates(parameters, asked.compiled)
        found = medians(ways, asked.turns) | medians(first_gradients(parameters, tokens), asked.turns)
        said = "  ".join(f"{way} {us:.0f}" for way, us in found.items())
        print(f"{name:6} {sum(p.numel() for p in parameters) / 1e6:6.2f} M parameters in {len(parameters)}, us: {said}",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
