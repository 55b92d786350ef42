"""Real CPU steps against what a profile predicts: ``python -m tests.bench.predicted``. Wants a quiet machine.

``raypipe profile``'s measurement of single layers becomes the cost table of every plan, the simulator predicts its
step, and the same stage actors then run all plans, which take turns, so that a slower minute of the machine hits all of
them. No step time enters a prediction. Two statements are checked: each prediction is within 8 % of the median step,
and the plan predicted to be the fastest is within 3 % of the one that was.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import uuid
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from raypipe.cost.profile import Profile
from raypipe.cost.stages import costs_of
from raypipe.data import prepare
from raypipe.job.load import job_from
from raypipe.job.spec import JobSpec
from raypipe.observe.run_log import METRICS, RunLog, read_rows
from raypipe.plan.plan import Plan, build_schedule
from raypipe.runtime.actor import Stage
from raypipe.runtime.better_plan import step_seconds
from raypipe.runtime.cluster import connect
from raypipe.runtime.driver import Driver
from raypipe.runtime.launch import Fleet, start_actors
from raypipe.runtime.profiling import measure_profile
from raypipe.train import make_plan

LIMIT, PICK = 0.08, 0.03
"""Largest share by which a prediction may be off, and by which the predicted best may be slower than the best."""
MODEL = {"type": "gpt", "layers": 8, "hidden": 256, "heads": 8, "sequence": 128, "vocabulary": 256, "dropout": 0.0}
BATCH = 32
WARM_UP = 2
"""Steps at the start of a turn that are left out."""


@dataclass(slots=True)
class Case:
    """One plan, and its turns."""

    schedule: str
    parallel: dict[str, Any] = field(default_factory=dict)
    predicted_s: float = 0.0
    measured_s: list[float] = field(default_factory=list)
    """Median step of each turn."""

    @property
    def label(self) -> str:
        """For the table."""
        return ", ".join(f"{k} {v}" for k, v in self.parallel.items())

    @property
    def error(self) -> float:
        """Of the prediction."""
        return self.predicted_s / median(self.measured_s) - 1

    def job(self, steps: int) -> JobSpec:
        """As a job file would say it."""
        return job_from(
            {
                "name": "predicted", "model": {**MODEL, "tie_embeddings": False},
                "data": {"type": "bytes", "path": "stdlib"},
                "train": {"steps": steps, "batch": BATCH, "optimizer": "adamw", "lr": 0.001, "eval_batches": 1},
                "parallel": {"schedule": self.schedule, "stages": 2, "microbatch": 4, **self.parallel},
            }
        )  # fmt: skip

    def predict(self, profile: Profile) -> None:
        """Step time by the simulator on the profile's costs."""
        plan = make_plan(self.job(1))
        schedule = build_schedule(plan, BATCH)
        costs = costs_of(profile, plan.cut, plan.parallel.microbatch, schedule)
        self.predicted_s = step_seconds(schedule, costs, clips=False, ahead=False)


def cases() -> list[Case]:
    """Schedules, micro-batch sizes, data parallelism, a single device."""
    return [
        Case("gpipe"), Case("1f1b"), Case("1f1b", {"microbatch": 2}), Case("1f1b", {"microbatch": 8}),
        Case("interleaved-1f1b", {"chunks": 2}), Case("zb-h1"), Case("zb-v"), Case("chimera"),
        Case("1f1b", {"stages": 1}), Case("1f1b", {"stages": 1, "microbatch": 8}),
        Case("1f1b", {"stages": 1, "replicas": 2}), Case("1f1b", {"stages": 1, "replicas": 2, "microbatch": 8}),
        Case("gpipe", {"recompute": "full"}),
    ]  # fmt: skip


def turn(case: Case, fleet: Fleet, data: Path, steps: int) -> None:
    """Train a few steps from the start weights; what comes after the last step is not timed."""
    job = case.job(steps)
    plan: Plan = make_plan(job)
    devices = plan.parallel.stages * plan.parallel.replicas
    actors = fleet.actors[:devices]
    locations = ray.get([actor.locate.remote() for actor in actors])  # a fresh port for every rendezvous
    fleet = replace(
        fleet, actors=actors, titles=fleet.titles[:devices], locations=locations, run_id=uuid.uuid4().hex[:8]
    )
    with tempfile.TemporaryDirectory(dir=data.parent) as name:
        directory = Path(name)
        (directory / "data").symlink_to(data)
        log = RunLog(directory)
        try:
            Driver(job, plan, directory, log, lambda *_: None).run(fleet, None, 0)
        finally:
            log.close()
        times = [row["step_s"] for row in read_rows(directory / METRICS) if "loss" in row]
    case.measured_s.append(median(times[WARM_UP:]))


def show(found: list[Case], out: Console) -> bool:
    """Print the table and the two verdicts; returns whether both hold."""
    table = Table(title="steps of real CPU runs, milliseconds", title_justify="left")
    for name in ("schedule", "plan", "predicted", "measured", "range", "difference"):
        table.add_column(name, justify="left" if name in ("schedule", "plan") else "right")
    for case in sorted(found, key=lambda c: median(c.measured_s)):
        low, high = 1e3 * min(case.measured_s), 1e3 * max(case.measured_s)
        table.add_row(
            case.schedule, case.label, f"{1e3 * case.predicted_s:.0f}", f"{1e3 * median(case.measured_s):.0f}",
            f"{low:.0f} - {high:.0f}", f"{case.error:+.1%}",
        )  # fmt: skip
    out.print(table)
    worst = max(abs(case.error) for case in found)
    out.print(
        f"{len(found)} plans: median {median(abs(c.error) for c in found):.1%}, worst {worst:.1%} (at most {LIMIT:.0%})"
    )
    pick = min(found, key=lambda c: c.predicted_s)
    loss = median(pick.measured_s) / min(median(c.measured_s) for c in found) - 1
    out.print(
        f"predicted best: {pick.schedule} {pick.label}, {loss:.1%} slower than the best measured (at most {PICK:.0%})"
    )
    return worst <= LIMIT and loss <= PICK


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.predicted", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7, help=f"of a turn; the first {WARM_UP} are left out")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it works, measures little")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these schedules")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rounds, steps = (1, WARM_UP + 2) if args.quick else (args.rounds, args.steps)
    os.environ.setdefault("RAY_ADDRESS", "local")
    out, progress = Console(width=110), Console(stderr=True)
    found = [case for case in cases() if args.only is None or case.schedule in args.only]
    with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory(prefix="raypipe-predicted-") as name:
        data = Path(name) / "data"
        job = found[0].job(1)
        prepare(job.data, MODEL["sequence"], data)
        request = connect(2)
        profile = measure_profile(
            job, [2, 4, 8], 2, quick=args.quick, data=data, say=lambda text: progress.print(text, style="dim")
        )
        fleet = start_actors([f"device {d}" for d in range(2)], request, Stage)
        try:
            for case in found:
                case.predict(profile)
            for number in range(rounds):
                # Every second round runs backwards: nobody always follows the same neighbour.
                for case in found if number % 2 == 0 else found[::-1]:
                    progress.print(f"round {number + 1} of {rounds}: {case.schedule} {case.label}", style="dim")
                    turn(case, fleet, data, steps)
        finally:
            fleet.stop()
            ray.shutdown()
    holds = show(found, out)
    if args.json:
        rows = [{"schedule": c.schedule, "plan": c.label, "predicted_s": c.predicted_s, "measured_s": c.measured_s}
                for c in found]  # fmt: skip
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
