"""Sharded pipelines through the real runtime on emulated devices: ``python -m tests.bench.accuracy.sharded``.

4 x 4 devices (PP x DP) with 25 Gb/s links between copies: 6.2 billion parameters in 16 bits, 8 micro-batches of 8192
tokens at 125 TFLOP/s. FS-1F1B gathers a stage for every forward and every backward, FS-ZeroPP 2V - 1 times a unit
(ZeroPP, section 3.3). Limit: FS-ZeroPP has at least 1.25 times the throughput. Sixteen processes; starts Ray.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median

from raypipe.runtime.emulation.emulated_run import Emulated, emulate
from raypipe.runtime.emulation.links import Links
from raypipe.schedule import Shape, generate
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.passes import shard

DEPTH, COPIES, COUNT = 4, 4, 8
PARAMETERS, TOKENS, FLOPS, LINK = 6.2e9, 8192, 125e12, 25e9 / 8
LEAST = 1.25


def run(order: Schedule, chunks: int, steps: int, scale: float) -> Emulated:
    """Emulate a sharded order; every time, links included, is ``scale`` times as long."""
    forward = 2 * PARAMETERS / DEPTH * TOKENS / FLOPS * scale / chunks
    links = Links(bytes_per_s=LINK / scale, gradient_bytes=2 * PARAMETERS / DEPTH / chunks)
    return emulate(order, CostTable.even(DEPTH * chunks, forward, forward, forward), links, steps, COPIES)


def main() -> int:
    """Print both steps and their ratio; exit status 1 below the limit."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.accuracy.sharded", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--scale", type=float, default=0.2, help="of all times: shorter runs, more overhead [0.2]")
    parser.add_argument("--chunks", type=int, default=4, help="stages a device of FS-ZeroPP [4]")
    args = parser.parse_args()
    plain = generate("1f1b", Shape(devices=DEPTH, microbatches=COUNT))
    zeropp = generate("zeropp", Shape(devices=DEPTH, microbatches=COUNT, chunks=args.chunks, unit=COUNT))
    cases = {
        "FS-1F1B": (shard(plain, 3, gather="microbatch"), 1),
        "FS-ZeroPP": (shard(zeropp, 3, unit=COUNT, ahead=4), args.chunks),
    }
    found: dict[str, float] = {}
    for name, (order, chunks) in cases.items():
        one = run(order, chunks, args.steps, args.scale)
        found[name] = median(one.measured_s[1:]) / args.scale
        print(f"{name}: step {found[name]:.2f} s, predicted {one.predicted_s / args.scale:.2f} s", flush=True)
    gain = found["FS-1F1B"] / found["FS-ZeroPP"]
    print(f"FS-ZeroPP over FS-1F1B: {gain:.2f} times the throughput (limit {LEAST})")
    return 0 if gain >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
