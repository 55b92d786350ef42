"""Emulated steps against their prediction, over every schedule: ``python -m tests.bench.accuracy.emulated``.

Real driver, actors, programs and messages; kernels are timed waits. One fleet serves all configurations, which take
turns, so that a slower minute of the machine hits all of them. Wants a quiet machine: sixteen actors on two cores have
little to spare.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from raypipe.runtime.cluster.connect import connect
from raypipe.runtime.emulation.emulated_run import Rehearsal, rehearsal, run_rehearsal, start_emulated_devices
from raypipe.runtime.emulation.links import Links
from raypipe.runtime.group.worker_group import WorkerGroup
from raypipe.schedule import SCHEDULES, Shape, generate, stages_of
from raypipe.schedule.costs import CostTable, each_latency
from raypipe.search import search

MEDIAN, WORST = 0.03, 0.06
"""Largest share by which measured steps may differ from predicted ones: in the middle, and anywhere."""
MS = 1e-3
NO_LIMIT = Links()
GRADIENTS = Links(latency_s=20e-6, bytes_per_s=1e9, message_bytes=2e6, gradient_bytes=10e6)
"""1 GB/s: 2 ms a message, 10 ms to sum a stage's gradients over two holders."""


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration; costs in milliseconds, of a device's share of the model."""

    name: str
    devices: int
    microbatches: int
    replicas: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    forward: float = 10.0
    input_grad: float = 10.0
    weight_grad: float = 10.0
    recompute: float = 0.0
    uneven: float = 0.0
    """Share by which the stages' times differ, from the first to the last."""
    comm: float = 0.0
    links: Links = NO_LIMIT

    @property
    def label(self) -> str:
        """For the table."""
        words = [f"D={self.devices} N={self.microbatches}"]
        words += [f"W={self.replicas}"] if self.replicas > 1 else []
        words += [f"{key} {value}" for key, value in self.options.items()]
        words += [f"uneven {self.uneven:.0%}"] if self.uneven else []
        words += [f"latency {self.comm:g} ms"] if self.comm else []
        words += ["1 GB/s"] if self.links.bytes_per_s < float("inf") else []
        return ", ".join(words)

    def rehearsal(self) -> Rehearsal:
        """The whole step over all devices."""
        if self.name == "auto":
            costs = self._costs(self.devices)
            base = search((tuple(range(self.devices)),), self.microbatches, costs, budget_s=2.0).schedule
        else:
            shape = Shape(devices=self.devices, microbatches=self.microbatches, **self.options)
            costs = self._costs(stages_of(self.name, shape))
            base = generate(self.name, shape, costs)
        return rehearsal(base, costs, self.links, self.replicas)

    def _costs(self, stages: int) -> CostTable:
        share = self.devices / stages * MS
        scale = [share * (1 + self.uneven * (s / (stages - 1) - 0.5)) if stages > 1 else share for s in range(stages)]
        return CostTable(
            forward=tuple(k * self.forward for k in scale), input_grad=tuple(k * self.input_grad for k in scale),
            weight_grad=tuple(k * self.weight_grad for k in scale), recompute=tuple(k * self.recompute for k in scale),
            all_reduce=(0.0,) * stages, update=(0.0,) * stages, comm=self.comm * MS,
        )  # fmt: skip


CASES = (
    Case("gpipe", 2, 8),
    Case("gpipe", 4, 8, comm=2.0),
    Case("gpipe", 2, 4, 2, links=GRADIENTS),
    Case("1f1b", 2, 8, uneven=0.6),
    Case("1f1b", 4, 8, 2),
    Case("1f1b", 8, 16),
    Case("1f1b", 8, 8, 2, comm=1.0),
    Case("dapple", 4, 8, uneven=0.5, comm=1.0),
    Case("interleaved-1f1b", 2, 8, options={"chunks": 2}),
    Case("interleaved-1f1b", 4, 8, options={"chunks": 2}, forward=20, input_grad=20, weight_grad=20, comm=1.0),
    Case("bfs", 4, 8, options={"chunks": 2}, forward=20, input_grad=20, weight_grad=20),
    Case("chimera", 4, 8),
    Case("chimera", 8, 8, comm=1.0),
    Case("chimera", 4, 8, options={"concat": "doubling"}, recompute=10.0),
    Case("chimera", 4, 8, options={"concat": "halving"}, forward=20, input_grad=20, weight_grad=20),
    Case("chimera", 4, 4, 2, links=GRADIENTS),
    Case("chimera-tight", 4, 8),
    Case("gems", 4, 4),
    Case("pipedream", 4, 8, uneven=0.4),
    Case("pipedream-2bw", 4, 8, 2, links=GRADIENTS),
    Case("zb-h1", 4, 8),
    Case("zb-h1", 8, 16, uneven=0.4, comm=1.0),
    Case("zb-h2", 4, 12),
    Case("zb-h2", 8, 16, comm=1.0),
    Case("zb-v", 4, 8, forward=20, input_grad=20, weight_grad=20),
    Case("zeropp", 4, 8, options={"chunks": 2, "unit": 4}, forward=20, input_grad=20, weight_grad=20),
    Case("zeropp", 2, 8, 2, options={"chunks": 2, "unit": 4}, forward=20, input_grad=20, weight_grad=20),
    Case("early-recompute", 4, 8, recompute=10.0),
    Case("shifted-critical-path", 4, 8, recompute=10.0, comm=1.0),
    Case("model-parallel", 4, 4),
    Case("fast-forward", 4, 8, options={"chunks": 2}, forward=20, input_grad=20, weight_grad=20),
    Case("modulo", 4, 8, options={"chunks": 2}, forward=20, input_grad=20, weight_grad=20, comm=1.0),
    Case("auto", 4, 8, uneven=0.6, comm=2.0),
    Case("auto", 8, 16, uneven=0.4),
)


def longer(costs: CostTable, scale: float) -> CostTable:
    """The costs with every time ``scale`` times as long."""
    names = [f.name for f in fields(costs) if f.name not in ("comm", "overlap")]
    rows = {name: tuple(scale * t for t in getattr(costs, name)) for name in names}
    return replace(costs, **rows, comm=each_latency(costs.comm, lambda seconds: scale * seconds))


@contextlib.contextmanager
def worker_group_of(devices: int) -> Iterator[WorkerGroup]:
    """Emulated devices that all configurations share."""
    os.environ.setdefault("RAY_ADDRESS", "local")
    request = connect(devices, emulated=True)
    workers = start_emulated_devices([f"emulated · device {d}" for d in range(devices)], request)
    try:
        yield workers
    finally:
        workers.stop()
        ray.shutdown()


def first(workers: WorkerGroup, devices: int) -> WorkerGroup:
    """The first of them, with a fresh port for their rendezvous."""
    actors = workers.actors[:devices]
    locations = ray.get([actor.locate.remote() for actor in actors])
    return replace(workers, actors=actors, locations=locations, run_id=uuid.uuid4().hex[:8])


@dataclass(slots=True)
class Outcome:
    """A configuration's turns."""

    case: Case
    what: Rehearsal
    predicted_s: float = 0.0
    measured_s: list[float] = field(default_factory=list)
    """Mean step of each turn, the first step left out."""

    @property
    def error(self) -> float:
        """Of the median turn."""
        return median(self.measured_s) / self.predicted_s - 1


def turn(outcome: Outcome, workers: WorkerGroup, steps: int) -> None:
    """Run a configuration once."""
    found = run_rehearsal(outcome.what, first(workers, outcome.what.schedule.devices), steps)
    outcome.predicted_s = sum(found.predicted_steps_s[1:]) / (steps - 1)
    outcome.measured_s.append(sum(found.measured_s[1:]) / (steps - 1))


def show(outcomes: list[Outcome], out: Console) -> tuple[float, float]:
    """Print the table; returns the median and the largest share by which measured and predicted differ."""
    table = Table(title="emulated steps, milliseconds", title_justify="left")
    for name in ("schedule", "configuration", "predicted", "measured", "range", "difference"):
        table.add_column(name, justify="left" if name in ("schedule", "configuration") else "right")
    for one in outcomes:
        low, high = 1e3 * min(one.measured_s), 1e3 * max(one.measured_s)
        table.add_row(
            one.case.name, one.case.label, f"{1e3 * one.predicted_s:.1f}", f"{1e3 * median(one.measured_s):.1f}",
            f"{low:.1f} - {high:.1f}", f"{one.error:+.1%}",
        )  # fmt: skip
    out.print(table)
    errors = [abs(one.error) for one in outcomes]
    middle, worst = median(errors), max(errors)
    names = sorted({one.case.name for one in outcomes})
    out.print(
        f"{len(outcomes)} configurations of {len(names)} schedules: median {middle:.1%} (at most {MEDIAN:.0%}), "
        f"worst {worst:.1%} (at most {WORST:.0%})"
    )
    return middle, worst


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.accuracy.emulated", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn, of which the first is left out")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these schedules")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    cases = [case for case in CASES if args.only is None or case.name in args.only]
    missing = set(SCHEDULES) - {case.name for case in cases}
    out, progress = Console(width=120), Console(stderr=True)
    if missing and args.only is None:
        out.print(f"no configuration of {', '.join(sorted(missing))}")
        return 1
    outcomes = [Outcome(case, case.rehearsal()) for case in cases]
    with (
        contextlib.redirect_stdout(sys.stderr),
        worker_group_of(max(one.what.schedule.devices for one in outcomes)) as workers,
    ):
        for number in range(args.rounds):
            # Every second round runs backwards: nobody always follows the same neighbour.
            for one in outcomes if number % 2 == 0 else outcomes[::-1]:
                progress.print(f"round {number + 1} of {args.rounds}: {one.case.name} {one.case.label}", style="dim")
                turn(one, workers, args.steps)
    middle, worst = show(outcomes, out)
    if args.json:
        rows = [
            {"schedule": o.case.name, "configuration": o.case.label, "predicted_s": o.predicted_s,
             "measured_s": o.measured_s, "difference": o.error}
            for o in outcomes
        ]  # fmt: skip
        args.json.write_text(json.dumps({"median": middle, "worst": worst, "rows": rows}, indent=1) + "\n")
    return 0 if middle <= MEDIAN and worst <= WORST else 1


if __name__ == "__main__":
    sys.exit(main())
