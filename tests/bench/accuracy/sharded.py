"""Sharded pipelines through the real runtime on emulated devices.

    python -m tests.bench.accuracy.sharded [--steps 3] [--scale 0.2] [--chunks 4]

``--scale`` is of all times (shorter runs have more overhead), ``--chunks`` the stages a device of FS-ZeroPP.

4 x 4 devices (PP x DP) with 25 Gb/s links between copies: 6.2 billion parameters in 16 bits, 8 micro-batches of 8192
tokens at 125 TFLOP/s. FS-1F1B gathers a stage for every forward and every backward, FS-ZeroPP 2V - 1 times a unit
(ZeroPP, section 3.3). Limit: FS-ZeroPP has at least 1.25 times the throughput. Sixteen processes; starts Ray.
"""

from __future__ import annotations

import sys

from raypipe.runtime.emulation.emulated_run import rehearsal
from raypipe.runtime.emulation.links import Links
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.passes import shard
from tests.bench.command import options
from tests.bench.turns import Turns, lead, take_turns

DEPTH, COPIES, COUNT = 4, 4, 8
PARAMETERS, TOKENS, FLOPS, LINK = 6.2e9, 8192, 125e12, 25e9 / 8
LEAST = 1.25


def turns_of(name: str, order: Schedule, chunks: int, scale: float) -> Turns:
    """Return a sharded order with every time, links included, ``scale`` times as long."""
    forward = 2 * PARAMETERS / DEPTH * TOKENS / FLOPS * scale / chunks
    links = Links(bytes_per_s=LINK / scale, gradient_bytes=2 * PARAMETERS / DEPTH / chunks)
    costs = CostTable.even(DEPTH * chunks, forward, forward, forward)
    return Turns(rehearsal(order, costs, links, COPIES), name)


def main() -> int:
    """Print both steps and their ratio; exit status 1 below the limit."""
    args = options(__doc__, steps=3, scale=0.2, chunks=4)
    plain = generate("1f1b", Shape(devices=DEPTH, microbatches=COUNT))
    zeropp = generate("zeropp", Shape(devices=DEPTH, microbatches=COUNT, chunks=args.chunks, unit=COUNT))
    found = [
        turns_of("FS-1F1B", shard(plain, 3, gather="microbatch"), 1, args.scale),
        turns_of("FS-ZeroPP", shard(zeropp, 3, unit=COUNT, ahead=4), args.chunks, args.scale),
    ]
    take_turns(found, 1, args.steps)
    for one in found:
        print(f"{one.name}: step {one.step_s / args.scale:.2f} s, predicted {one.predicted_s / args.scale:.2f} s")
    _, gain = lead(found[1], found[0])
    print(f"FS-ZeroPP over FS-1F1B: {gain:.2f} times the throughput (limit {LEAST})")
    return 0 if gain >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
