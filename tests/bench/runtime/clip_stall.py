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

from raypipe.runtime.emulation.emulated_run import rehearsal
from raypipe.runtime.emulation.links import Links
from raypipe.runtime.process.set_up import set_up_process
from raypipe.runtime.update.optimizer import OptimizerSnapshot
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.lowering.norm_policy import NormPolicy
from tests.bench.command import options
from tests.bench.turns import MS, Turns, table, take_turns

TASK_S = 0.010
WAYS: dict[str, NormPolicy] = {"no clip": "none", "wait": "wait", "optimistic": "optimistic", "undone": "optimistic"}


def stall(name: str, devices: int, microbatches: int, steps: int, rounds: int, undo: int) -> list[str]:
    """One row: predicted and measured milliseconds a step, per way."""
    base = generate(name, Shape(devices=devices, microbatches=microbatches))
    chunk = TASK_S * devices / base.stages
    costs = CostTable.even(base.stages, chunk, chunk, chunk)
    ways = {
        way: Turns(rehearsal(base, costs, Links(), 1, norm, undo if way == "undone" else 0), way)
        for way, norm in WAYS.items()
    }
    after: list[float] = []

    def keep(one: Turns) -> None:
        # Steps count from 1; the step after one whose update is undone holds the second run of its forwards.
        if one.name == "undone" and one.last is not None:
            after.extend(s for k, s in enumerate(one.last.measured_s) if k and k % undo == 0)

    take_turns(list(ways.values()), rounds, steps, then=keep)
    cells = [f"{one.step_s / MS:.1f} ({one.predicted_s / MS:.0f})" for way, one in ways.items() if way != "undone"]
    return [name, *cells, f"{median(after) / MS:.1f}"]


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
    shape = f"{asked.devices} devices, {asked.microbatches} micro-batches, F = B = W = {TASK_S / MS:g} ms a device"
    table(f"{shape}: ms a step (predicted)", ("schedule", *WAYS), rows)
    million = 20
    plain, copied = update_ms(million, undo=False), update_ms(million, undo=True)
    print(
        f"\nAdamW over {million} million float32 parameters, one thread: {plain:.1f} ms, with the copy {copied:.1f} ms"
    )


if __name__ == "__main__":
    main()
