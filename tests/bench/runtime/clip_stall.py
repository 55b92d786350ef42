"""What clipping by the global norm costs: devices that need none, wait for it, or run ahead of it.

    python -m tests.bench.runtime.clip_stall [--devices 4] [--microbatches 8] [--steps 30] [--rounds 3] [--undo 5]

First the stall: emulated devices, so real actors, messages, programs and norm, but timed waits for kernels. The rounds
of the four ways are interleaved; "undone" is running ahead where every ``--undo``-th step has to be clipped, timed on
those steps only. Then what running ahead adds to an update: the copy of parameters and optimizer state.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from raypipe.runtime.emulation.emulated_run import emulate
from raypipe.runtime.emulation.links import Links
from raypipe.runtime.process.set_up import set_up_process
from raypipe.runtime.update.optimizer import OptimizerSnapshot
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.lowering.norm_policy import NormPolicy
from tests.bench.command import options

TASK_S = 0.010
WAYS: dict[str, NormPolicy] = {"no clip": "none", "wait": "wait", "optimistic": "optimistic", "undone": "optimistic"}


def stall(name: str, devices: int, microbatches: int, steps: int, rounds: int, undo: int) -> list[str]:
    """One row: predicted and measured milliseconds a step, per way."""
    base = generate(name, Shape(devices=devices, microbatches=microbatches))
    chunk = TASK_S * devices / base.stages
    costs = CostTable.even(base.stages, chunk, chunk, chunk)
    seen: dict[str, list[float]] = {way: [] for way in WAYS}
    predicted: dict[str, float] = {}
    for _ in range(rounds):
        for way, norm in WAYS.items():
            every = undo if way == "undone" else 0
            found = emulate(base, costs, Links(), steps, 1, norm, every)
            predicted[way] = found.predicted_s
            # Steps count from 1; the step after one whose update is undone holds the second run of its forwards.
            after = [s for k, s in enumerate(found.measured_s) if k and (not every or k % every == 0)]
            seen[way] += after
    cells = [f"{median(seen[w]) * 1e3:.1f}" + (f" ({predicted[w] * 1e3:.0f})" if w != "undone" else "") for w in WAYS]
    return [name, *cells]


def update_ms(million: int, undo: bool, steps: int = 8) -> float:
    """Milliseconds of a fused AdamW step over ``million`` million float32 parameters, with or without the copy."""
    set_up_process(torch.device("cpu"))  # as in a stage actor, which keeps freed memory
    parameters = [torch.nn.Parameter(torch.zeros(1000, 1000)) for _ in range(million)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for p in parameters:
        p.grad = torch.full_like(p, 1e-3)
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        kept = OptimizerSnapshot(optimizer) if undo else None
        optimizer.step()
        times.append(time.perf_counter() - begun)
        del kept
    return median(times[2:]) * 1e3


def main() -> None:
    """Print both tables."""
    asked = options(__doc__, devices=4, microbatches=8, steps=30, rounds=3, undo=5)
    rows = [
        stall(name, asked.devices, asked.microbatches, asked.steps, asked.rounds, asked.undo)
        for name in ("zb-h2", "zb-v", "zeropp", "1f1b")
    ]
    shape = f"{asked.devices} devices, {asked.microbatches} micro-batches, F = B = W = {TASK_S * 1e3:g} ms a device"
    shown = Table("schedule", *WAYS, title=f"{shape}: ms a step (predicted)")
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)
    million = 20
    plain, copied = update_ms(million, undo=False), update_ms(million, undo=True)
    print(
        f"\nAdamW over {million} million float32 parameters, one thread: {plain:.1f} ms, with the copy {copied:.1f} ms"
    )


if __name__ == "__main__":
    main()
