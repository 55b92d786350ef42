"""What the least makespan of a line in very little memory is, proven: D = 8, N = 16, (F, B, W, c) = (10, 12, 8, 1).

Run: ``python -m tests.bench.auto_tight [--seconds S]``, the time for each proof; two minutes in all on two quiet cores.

The constraint program of ``tests/search/judge.py`` (CP-SAT) takes the micro-batches in turn at every stage and kind,
which loses nothing. Take any step and, at each (stage, kind), give its start times to the micro-batches in ascending
order. Tasks of one (stage, kind) are equally long, so each device runs the same intervals as before and holds as many
activations at any time. And a dependency survives: the m-th of the later kind has m earlier ones of its kind before or
with it, each of which follows a task of the kind it depends on, so at least m of those have ended (and their messages
have arrived) by then; hence so has the m-th in ascending order.

An activation lives from the start of its F to the end of its W. A device runs one task at a time, so it makes no
difference whether it dies at W's start or W's end: the next F cannot start in between. The other readings of "4
activations" are an activation that dies at the end of B already, and a joint backward.
"""

from __future__ import annotations

import argparse
import time

from raypipe.schedule.costs import CostTable
from raypipe.search import search
from tests.search.judge import judge

DEPTH, COUNT, TIMES, LATENCY = 8, 16, (10, 12, 8), 1


def run(seconds: float) -> None:
    """Print one line a reading: the proof, and what the search finds in its default time."""
    line = (tuple(range(DEPTH)),)
    f, b, w = ([t] * DEPTH for t in TIMES)
    costs = CostTable.even(DEPTH, *TIMES, comm=LATENCY)
    for memory, split, freed_by in ((6, True, "W"), (4, True, "W"), (4, True, "B"), (4, False, "W")):
        began = time.monotonic()
        verdict = judge(line, COUNT, f, b, w, LATENCY, memory, split, seconds=seconds, freed_by=freed_by)
        spent = time.monotonic() - began
        found = search(line, COUNT, costs, memory_limit=memory, split=split, freed_by_b=float(freed_by == "B"))
        status = "optimal" if verdict.makespan == verdict.bound else f"feasible, bound {verdict.bound}"
        backward = "split" if split else "joint"
        print(
            f"{memory} activations, {backward} backward, alive to the end of {freed_by if split else 'BW'}: "
            f"{verdict.makespan} {status} ({spent:.0f} s); auto {found.value:g}, bound {found.bound:g}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.auto_tight", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="for each proof")
    run(parser.parse_args().seconds)
