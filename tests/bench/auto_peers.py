"""``auto`` beside the zero-bubble authors' scheduler, on figures that their own code gave.

Run: ``python -m tests.bench.auto_peers``, a minute on one core.

The figures were taken once by running ``Graph.manual_order`` of the zero-bubble repository (all eight choices, the
best) and are not made here. It makes the longest device's span small, in a memory limit per device in activations of
which the B gives back a share. With a share of a half it gives, for F, B, W, c and the limit in devices: the table
below; its rows with F = B = W = 10 and c = 0 come out the same with any share.
"""

from __future__ import annotations

import argparse

from raypipe.schedule.costs import CostTable
from raypipe.search import search

PEER = [
    (4, 16, (10, 11, 8, 1), 515, 473), (8, 32, (10, 11, 8, 1), 1047, 939), (8, 64, (10, 11, 8, 1), 1975, 1867),
    (16, 64, (10, 11, 8, 1), 2111, 1891), (32, 128, (10, 11, 8, 1), 4239, 3795), (8, 24, (10, 10, 10, 0), 790, 720),
]  # fmt: skip
"""Devices, micro-batches, times, span in 1F1B's memory and in twice as much."""


def run() -> None:
    """Print one line a case; fails if any is worse."""
    print("    D x N     memory   peer   auto  bound  seconds   auto's makespan")
    for depth, count, (f, b, w, c), same, twice in PEER:
        costs = CostTable.even(depth, f, b, w, comm=c)
        for memory, peer in ((depth, same), (2 * depth, twice)):
            line = (tuple(range(depth)),)
            found = search(line, count, costs, memory_limit=memory, freed_by_b=0.5, objective="span")
            whole = search(line, count, costs, memory_limit=memory, freed_by_b=0.5)
            print(
                f"{depth:>5} x {count:<4} {memory:>6} {peer:>8} {found.value:>6g} {found.bound:>6g} "
                f"{found.seconds:>7.2f} {whole.value:>10g} (bound {whole.bound:g})",
                flush=True,
            )
            assert found.value <= peer, "the peer's order is shorter"


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m tests.bench.auto_peers", description=__doc__).parse_args()
    run()
