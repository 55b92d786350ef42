"""How long it takes to generate, link and time a schedule, and whether that grows linearly in its tasks.

Run: ``python tests/bench/schedule_speed.py [NAME] [DEVICES]``. Split backward, even costs; the period and the peak
activations are included. Processor seconds of one process on one core.
"""

from __future__ import annotations

import itertools
import resource
import sys
import time

from raypipe.schedule import Shape, generate, stages_of
from raypipe.schedule.costs import CostTable
from raypipe.schedule.deps import link
from raypipe.schedule.passes import split_backward
from raypipe.simulate.engine import simulate
from raypipe.simulate.period import period


def measure(name: str, devices: int, count: int) -> tuple[int, list[float]]:
    """Tasks, and processor seconds for: generate, link, simulate with peak activations, period."""
    shape = Shape(devices=devices, microbatches=count)
    costs = CostTable.even(stages_of(name, shape))
    at = [time.process_time()]
    schedule = split_backward(generate(name, shape, costs))
    at.append(time.process_time())
    graph = link(schedule)
    at.append(time.process_time())
    timeline = simulate(schedule, costs, graph)
    assert max(timeline.peak_activations) > 0
    at.append(time.process_time())
    assert period(schedule, costs, graph) <= timeline.makespan
    at.append(time.process_time())
    return len(graph.tasks), [b - a for a, b in itertools.pairwise(at)]


def main(name: str = "1f1b", devices: int = 64) -> None:
    """Print the curve for 64 to 1,024 micro-batches."""
    print(f"{name}, {devices} devices, split backward")
    heads = ("micro-batches", "tasks", "generate", "link", "simulate", "period", "sum s", "us/task")
    widths = (13, 8, 9, 7, 9, 7, 7, 8)
    print(" ".join(f"{h:>{w}}" for h, w in zip(heads, widths, strict=True)))
    for count in (64, 128, 256, 512, 1024):
        tasks, spent = measure(name, devices, count)
        row = " ".join(f"{s:>{w}.3f}" for s, w in zip(spent, (9, 7, 9, 7), strict=True))
        print(f"{count:>13} {tasks:>8} {row} {sum(spent):>7.3f} {1e6 * sum(spent) / tasks:>8.2f}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
