"""What copies of the workers' state in the nodes' memory (``train.copy_every``) cost: with them and without, in turns.

    python -m tests.bench.runtime.copy_cost [--turns 8] [--steps 16] [--every 4] [--width 512] [--case naps gpt]

One run takes turns: so many steps with a copy after every ``--every``, as many without. The cost is the time of the
steps with copies over that of the steps without, on either side of them, minus 1; the median over all turns, with half
the quartile range. Beside it the same of the processor time of all processes of Ray, the steps between copies that
``copy_every: auto`` chooses, and the cost with these: as much per copy. Exit status 1 where that is above 2 %.
``naps``: layers that take a given time without computing, as an accelerator's do for its host, over four stages.
``gpt``: a GPT over two stages on two CPUs, whose cores train all the time.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import psutil

from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import EVENTS, RunLog, read_rows
from raypipe.runtime.hosts.devices import physical_cores
from raypipe.runtime.saving.neighbour_copies import SHARE, NeighbourCopies, interval
from tests.bench.command import options, write_rows
from tests.ray_environment import start_ray
from tests.runtime.runs.small_runs import job_for, new_driver, own_workers

GPT = {"type": "gpt", "layers": 4, "hidden": 256, "heads": 4, "sequence": 128, "vocabulary": 256, "dropout": 0.0}
WARM = 1
"""Turns that are left out: keepers start in them."""


class InTurns(NeighbourCopies):
    """Copies in every other turn."""

    steps = 1

    def due(self, done: int) -> bool:
        """See NeighbourCopies.due."""
        return bool(done // self.steps % 2) and super().due(done)


class TimedLog(RunLog):
    """Notes when each step was collected, and the processor time until then in the first and last step of a turn."""

    steps = 1

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.at = {0: time.monotonic()}
        self.cpu: dict[int, float] = {}

    def metric(self, row: dict[str, Any]) -> None:
        """See RunLog.metric."""
        super().metric(row)
        if "loss" in row:
            self.at[row["step"]] = time.monotonic()
            if row["step"] % self.steps in (0, 1):
                self.cpu[row["step"]] = processor_s()


def processor_s() -> float:
    """Return the processor time that all processes of Ray have taken."""
    result = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            times = process.cpu_times()
            result += times.user + times.system
    return result


def naps(folder: Path, width: int, **train: Any) -> JobSpec:
    """Fourteen layers that nap, over four stages."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 64)
    np.savez(folder / "rows.npz", features=draw.normal(size=(64, width)) + labels[:, None], labels=labels)
    args = {"layers": 14, "seconds": 0.004, "folder": str(folder), "width": width}
    model = {"import": "tests.bench.runtime.stragglers:napping", "args": args}
    return job_for(model, folder / "rows.npz", {"schedule": "1f1b", "stages": 4, "microbatch": 1}, **train)


def gpt(folder: Path, width: int, **train: Any) -> JobSpec:
    """A GPT over two stages."""
    return job_for(GPT, {"type": "bytes", "path": "stdlib"}, {"schedule": "1f1b", "stages": 2}, **train)


CASES = {"naps": naps, "gpt": gpt}


def measure(case: str, folder: Path, turns: int, steps: int, every: int, width: int) -> dict[str, Any]:
    """Train with copies in every other turn, and compare."""
    more = {"steps": (2 * turns + 1) * steps, "copy_every": every, "dtype": "float32", "lr": 0.001}
    driver = new_driver(CASES[case](folder, width, **more), folder / "run", log=TimedLog)
    log = driver.log
    assert isinstance(log, TimedLog)
    driver.copies.__class__, InTurns.steps, TimedLog.steps = InTurns, steps, steps
    with driver.copies, own_workers(driver) as workers:
        driver.run(workers, None, 0)

    # A turn from its second step on: the first one ends what the turn before began.
    def of_turns(at: dict[int, float]) -> tuple[float, float, float]:
        took = [at[(k + 1) * steps] - at[k * steps + 1] for k in range(2 * turns + 1)]
        cost = [took[k] / (0.5 * (took[k - 1] + took[k + 1])) - 1 for k in range(1, 2 * turns, 2)][WARM:]
        low, _, high = quantiles(cost, n=4)
        return median(took[::2]) / (steps - 1), median(cost), (high - low) / 2

    (step_s, cost, spread), (cpu_s, cpu_cost, cpu_spread) = of_turns(log.at), of_turns(log.cpu)
    copied = [e for e in read_rows(folder / "run" / EVENTS) if e["event"] == "copied"][WARM * steps // every :]
    stall_s, seconds, used_s = (median(e[name] for e in copied) for name in ("stall_s", "seconds", "processor_s"))
    auto = interval(stall_s + used_s / physical_cores(), seconds, step_s)
    return {
        "case": case,
        "step_s": step_s,
        "cost": cost,
        "spread": spread,
        "cpu_step_s": cpu_s,
        "cpu_cost": cpu_cost,
        "cpu_spread": cpu_spread,
        "copies": len(copied),
        "bytes": copied[-1]["bytes"],
        "seconds": seconds,
        "stall_s": stall_s,
        "processor_s": used_s,
        "auto": auto,
        "auto_cost": cost * every / auto,
        "auto_cpu_cost": cpu_cost * every / auto,
    }


def main() -> int:
    """Print a line per case; exit status 1 where copies cost more than they may."""
    args = options(__doc__, turns=8, steps=16, every=4, width=512, case=CASES, json=Path)
    start_ray(4)
    found = []
    for case in args.case:
        with tempfile.TemporaryDirectory(prefix="raypipe-copies-") as name:
            found.append(measure(case, Path(name), args.turns, args.steps, args.every, args.width))
        print(json.dumps(found[-1]), flush=True)
    write_rows(args.json, found)
    return int(any(one["auto_cost"] > SHARE for one in found))


if __name__ == "__main__":
    sys.exit(main())
