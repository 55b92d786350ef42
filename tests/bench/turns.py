"""Steps on emulated devices that take turns, so that a slower minute of the machine hits all of them.

Real driver, actors, programs and messages; kernels are timed waits. One group of devices serves all. Wants a quiet
machine: sixteen actors on two cores have little to spare.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean, median

import ray
from rich.console import Console
from rich.table import Table

from raypipe.runtime.cluster.connect import connect
from raypipe.runtime.emulation.emulated_run import Emulated, Rehearsal, run_rehearsal, start_emulated_devices
from raypipe.runtime.emulation.emulated_worker import DeviceFaults
from raypipe.runtime.worker.worker_group import WorkerGroup
from raypipe.schedule.costs import CostTable, each_latency

MS = 1e-3


def longer(costs: CostTable, scale: float) -> CostTable:
    """Return the costs with every time ``scale`` times as long."""
    rows = {
        f.name: tuple(scale * t for t in getattr(costs, f.name))
        for f in fields(costs)
        if f.name not in ("comm", "overlap")
    }
    return replace(costs, **rows, comm=each_latency(costs.comm, lambda seconds: scale * seconds))


@contextlib.contextmanager
def worker_group_of(devices: int) -> Iterator[WorkerGroup]:
    """Start emulated devices, on a Ray of their own unless RAY_ADDRESS names one."""
    os.environ.setdefault("RAY_ADDRESS", "local")
    with contextlib.redirect_stdout(sys.stderr):
        request = connect(devices, emulated=True)
        workers = start_emulated_devices([f"emulated · device {d}" for d in range(devices)], request)
    try:
        yield workers
    finally:
        workers.stop()
        ray.shutdown()


def first(workers: WorkerGroup, devices: int) -> WorkerGroup:
    """Return the first of them, with a fresh port for their rendezvous."""
    actors = workers.actors[:devices]
    locations = ray.get([actor.locate.remote() for actor in actors])
    titles = workers.titles[:devices]
    return replace(workers, actors=actors, titles=titles, locations=locations, run_id=uuid.uuid4().hex[:8])


@dataclass(slots=True)
class Turns:
    """A step and its turns, in seconds; the first step of a turn has nobody to wait for and is left out."""

    what: Rehearsal
    name: str = ""
    faults: Mapping[int, DeviceFaults] = field(default_factory=dict)
    predicted_s: float = 0.0
    measured_s: list[float] = field(default_factory=list)
    """Mean step of each turn."""
    last: Emulated | None = None
    """The last turn."""

    @property
    def step_s(self) -> float:
        """Of the median turn."""
        return median(self.measured_s)

    @property
    def error(self) -> float:
        """Share by which the median turn is longer than predicted."""
        return self.step_s / self.predicted_s - 1

    def turn(self, workers: WorkerGroup, steps: int) -> None:
        """Run it once."""
        with contextlib.redirect_stdout(sys.stderr):
            self.last = run_rehearsal(self.what, first(workers, self.what.schedule.devices), steps, self.faults)
        self.predicted_s = fmean(self.last.predicted_steps_s[1:])
        self.measured_s.append(fmean(self.last.measured_s[1:]))


def take_turns(
    every: Sequence[Turns], rounds: int, steps: int, workers: WorkerGroup | None = None,
    then: Callable[[Turns], None] = lambda _: None,
) -> None:  # fmt: skip
    """Run all of them in every round, on devices of their own where none are given; ``then`` follows each turn."""
    with contextlib.ExitStack() as stack:
        if workers is None:
            workers = stack.enter_context(worker_group_of(max(one.what.schedule.devices for one in every)))
        for number in range(rounds):
            # Every second round runs backwards: nobody always follows the same neighbour.
            for one in every if number % 2 == 0 else every[::-1]:
                one.turn(workers, steps)
                then(one)


def lead(one: Turns, other: Turns) -> tuple[float, float]:
    """Return how many times as long ``other`` takes: predicted, and the median of each round's two turns."""
    measured = median(b / a for a, b in zip(one.measured_s, other.measured_s, strict=True))
    return other.predicted_s / one.predicted_s, measured


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1, width: int = 150) -> None:
    """Print a table; the first ``words`` columns are text, the others numbers."""
    made = Table(title=title, title_justify="left")
    for n, name in enumerate(columns):
        made.add_column(name, justify="left" if n < words else "right")
    for row in rows:
        made.add_row(*row)
    Console(width=width).print(made)
