"""Does the closed loop pay? ``python -m tests.bench.closed_loop``. Wants a quiet machine.

Plans made with wrong costs run on a machine whose right ones are known (``tests.bench.paced``: the real driver and
stage actors train a small model in float64, every task, message and gradient sum lasting a set time). Beside each run
with ``parallel.replan`` stand two without: the same plan left alone, and the plan that the planner makes from the right
costs. Also a machine that changes in the middle of a run; every family with right costs, where nothing is to be gained
and nothing should be swapped; and real CPU runs at their own speed. All losses must be equal to 1e-9.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from raypipe.auto import search
from raypipe.data import declared_fields, prepare_data
from raypipe.job.load import job_from
from raypipe.job.spec import JobSpec
from raypipe.models import build_model
from raypipe.observe.run_log import EVENTS, METRICS, RunLog, read_rows
from raypipe.plan.plan import Plan, build_schedule
from raypipe.runtime.better_plan import OBJECTIVES, SYNCS, runs_ahead, step_seconds
from raypipe.runtime.cluster import connect
from raypipe.runtime.driver import Driver
from raypipe.runtime.launch import Fleet, start_actors
from raypipe.schedule.costs import CostTable
from raypipe.schedule.memory import peak_activations
from raypipe.schedule.text import from_text, to_text
from raypipe.train import make_plan, with_plan
from tests.bench.paced import Pace, PacedStage

MS = 1e-3
SAME = 1e-9
"""Largest difference of two losses."""
SEARCH_S = 6.0
"""For the plan from the right costs."""
LAST = 10
"""Steps at the end of a run whose median is its step."""
TASK = 8 * MS


def even(stages: int, task: float = TASK) -> CostTable:
    """As an unsuspecting planner has it."""
    return CostTable.even(stages, task, task, task)


def slower(costs: CostTable, stage: int, factor: float) -> CostTable:
    """One stage that takes longer."""
    kinds = ("forward", "input_grad", "weight_grad", "recompute")
    return replace(
        costs,
        **{k: tuple(t * factor if s == stage else t for s, t in enumerate(getattr(costs, k))) for k in kinds},
    )


@dataclass(frozen=True, slots=True)
class Case:
    """A plan made for even costs, and the machine that it runs on."""

    name: str
    parallel: dict[str, Any]
    microbatches: int
    """Of one data-parallel copy."""
    truth: Callable[[int], CostTable]
    """Stages -> what the machine takes."""
    then: Callable[[int], CostTable] | None = None
    """The same from step ``change`` on."""
    change: int = 60
    steps: int = 110
    train: dict[str, Any] = field(default_factory=dict)
    noise: float = 0.0

    def job(self, replan: bool) -> JobSpec:
        """As a job file would say it."""
        parallel = {"microbatch": 2, "replan": replan, **self.parallel}
        copies = parallel.get("replicas", 1)
        stages = parallel["stages"] * max(2, parallel.get("chunks", 1))
        return job_from(
            {
                "name": "closed-loop",
                "model": {
                    "type": "gpt", "layers": stages, "hidden": 16, "heads": 2, "sequence": 16, "vocabulary": 256,
                    "tie_embeddings": False,
                },
                "data": {"type": "bytes", "path": "stdlib"},
                "train": {
                    "steps": self.steps, "batch": self.microbatches * parallel["microbatch"] * copies, "lr": 0.003,
                    "seed": 3, "dtype": "float64", "eval_batches": 1, **self.train,
                },
                "parallel": parallel,
            }
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run left behind."""

    losses: list[float]
    steps_s: list[float]
    events: list[dict[str, Any]]
    plan: Plan

    def step_s(self, until: int | None = None) -> float:
        """Median of the last steps, or of those before ``until``."""
        return median(self.steps_s[:until][-LAST:])


def drive(case: Case, job: JobSpec, plan: Plan, paces: Sequence[Pace], fleet: Fleet) -> Ran:
    """Train on the first of the fleet's actors."""
    job = with_plan(job, plan)
    schedule = build_schedule(plan, job.train.batch)
    actors = fleet.actors[: schedule.devices]
    if paces:
        ray.get([actor.set_pace.remote(paces, float(schedule.size)) for actor in actors])
    fleet = replace(
        fleet, actors=actors, titles=fleet.titles[: schedule.devices],
        locations=ray.get([actor.locate.remote() for actor in actors]), run_id=uuid.uuid4().hex[:8],
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="raypipe-loop-") as name:
        directory = Path(name)
        prepare_data(job, build_model(job, declared_fields(job.data)).task, directory / "data")
        log = RunLog(directory)
        driver = Driver(job, plan, directory, log, lambda *_: None)
        try:
            driver.run(fleet, None, 0)
        finally:
            log.close()
        rows = [row for row in read_rows(directory / METRICS) if "loss" in row]
        return Ran([r["loss"] for r in rows], [r["step_s"] for r in rows], read_rows(directory / EVENTS), driver.plan)


def plan_for(job: JobSpec, plan: Plan, costs: CostTable) -> Plan:
    """What the planner makes of the same placement and memory from these costs: an order searched for where backwards
    are split, and where gradients are summed."""
    clips = job.train.clip is not None
    text = plan.order
    base = from_text(text, "plan") if text else build_schedule(
        plan.model_copy(update={"parallel": plan.parallel.model_copy(update={"replicas": 1})}),
        job.train.batch // plan.parallel.replicas,
    )  # fmt: skip
    base = base.with_orders([t for t in order if t.kind not in ("AR", "U", "R")] for order in base.orders)
    orders = [plan.order]
    if any(t.kind == "W" for t in base.tasks()):
        limits = peak_activations(base)
        for objective in OBJECTIVES:
            found = search(
                base.placement, base.microbatches, costs, memory_limit=limits, objective=objective,
                budget_s=SEARCH_S / len(OBJECTIVES), starts=[base],
            )  # fmt: skip
            orders.append(to_text(replace(found.schedule, name=base.name)))
    several = build_schedule(plan, job.train.batch).replicas > 1

    def seconds(candidate: Plan) -> float:
        schedule = build_schedule(candidate, job.train.batch)
        return step_seconds(schedule, costs, clips, runs_ahead(candidate.parallel, clips, schedule, costs))

    return min(
        (
            plan.model_copy(
                update={"order": order, "parallel": plan.parallel.model_copy(update={"sync": sync, "replan": False})}
            )
            for order in orders
            for sync in (SYNCS if several else (plan.parallel.sync,))
        ),
        key=seconds,
    )


def searched_for(job: JobSpec, believed: CostTable) -> Plan:
    """The plan of a job as somebody made it who believed in these costs."""
    plan = make_plan(job)
    if job.parallel.schedule != "auto":
        return plan
    schedule = from_text(plan.order or "", "plan")
    found = search(
        schedule.placement, schedule.microbatches, believed, memory_limit=job.parallel.memory_limit, budget_s=3.0
    )  # fmt: skip
    return plan.model_copy(update={"order": to_text(replace(found.schedule, name="auto"))})


@dataclass(slots=True)
class Outcome:
    """Three runs of a case."""

    case: Case
    alone: Ran
    right: Ran
    loop: Ran

    @property
    def difference(self) -> float:
        """Largest of two losses of the same step."""
        return max(
            abs(a - b)
            for other in (self.alone, self.right)
            for a, b in zip(self.loop.losses, other.losses, strict=True)
        )

    @property
    def decisions(self) -> list[str]:
        """In words."""
        return [line for event in self.loop.events if (line := told(event)) is not None]


def told(event: dict[str, Any]) -> str | None:
    """A decision of the loop."""
    kind, at = event["event"], event.get("step")
    if kind == "replanned":
        return f"step {at}: {event['change']}; predicted {event['gain']:+.1%}"
    if kind == "realised":
        return f"step {at}: realised {event['gain']:+.1%} (predicted {event['predicted_gain']:+.1%})"
    if kind == "kept":
        return f"step {at}: kept, {event['reason']} ({event['gain']:+.1%})"
    if kind == "drifted":
        return f"step {at}: drifted from {event['was_s'] / MS:.0f} to {event['now_s'] / MS:.0f} ms"
    if kind == "refitted":
        return f"step {at}: {event['task']} of stage {event['stage']} x{event['ratio']:.2f}"
    if kind == "reverted":
        return f"step {at}: went back"
    if kind == "recompute":
        return f"step {at}: alpha {event['alpha']:.2f}, {event['peak_mb']:.1f} MB, next {event['next']:.2f}"
    return None


AUTO = {"schedule": "auto", "stages": 4}
CASES = (
    Case("stage 2 slower x1.5", {**AUTO, "memory_limit": 5}, 8, lambda n: slower(even(n), 2, 1.5)),
    Case("slow link 1-2", {**AUTO, "memory_limit": 5}, 8, lambda n: replace(even(n), comm=(0.0, 2.5 * TASK, 0.0))),
    Case("W cheap", {**AUTO, "memory_limit": 4}, 8, lambda n: CostTable.even(n, TASK, TASK, 0.3 * TASK)),
    Case("zb-h1, W dear", {"schedule": "zb-h1", "stages": 4}, 8,
         lambda n: slower(CostTable.even(n, 0.6 * TASK, 0.8 * TASK, 1.6 * TASK), 0, 0.6)),
    Case("zb-v, last stages slower", {"schedule": "zb-v", "stages": 2}, 6,
         lambda n: slower(slower(even(n), n - 1, 1.4), 0, 0.5)),
    Case("gradient sums slow", {"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2, "replicas": 2}, 4,
         lambda n: replace(even(n), all_reduce=(4 * TASK,) * n)),
    Case("stage 1 slower at step 60", {**AUTO, "memory_limit": 5}, 8, even,
         then=lambda n: slower(even(n), 1, 1.5), steps=220),
    Case("clipped: stage 2 slower", {**AUTO, "memory_limit": 5}, 8, lambda n: slower(even(n), 2, 1.5),
         train={"clip": 1.0}),
)  # fmt: skip


def run_case(case: Case, fleet: Fleet, say: Callable[[str], None]) -> Outcome:
    """The plan left alone, the right plan, and the loop."""
    job = case.job(replan=False)
    stages = len(make_plan(job).cut)
    plan = searched_for(job, even(stages))
    truth = case.truth(stages)
    paces = [Pace(costs=truth, noise=case.noise)]
    final = truth
    if case.then is not None:
        final = case.then(stages)
        paces.append(Pace(costs=final, first_step=case.change, noise=case.noise))
    runs = []
    for what, one in (("left alone", plan), ("right from the start", plan_for(job, plan, final))):
        say(f"{case.name}: {what}")
        runs.append(drive(case, job, one, paces, fleet))
    say(f"{case.name}: planned again")
    again = plan.model_copy(update={"parallel": plan.parallel.model_copy(update={"replan": True})})
    return Outcome(case, runs[0], runs[1], drive(case, case.job(replan=True), again, paces, fleet))


def show(outcomes: list[Outcome], out: Console) -> bool:
    """Print the table; whether all losses are equal and no run ended slower than it began."""
    table = Table(title="plans made for wrong costs; step in milliseconds", title_justify="left")
    for name in ("what is wrong", "left alone", "planned again", "right plan", "recovered", "loss diff", "decisions"):
        table.add_column(name, justify="left" if name in ("what is wrong", "decisions") else "right")
    good = True
    for one in outcomes:
        alone, loop, right = (r.step_s() / MS for r in (one.alone, one.loop, one.right))
        share = (alone - loop) / (alone - right) if alone > right else 1.0
        table.add_row(
            one.case.name, f"{alone:.1f}", f"{loop:.1f}", f"{right:.1f}", f"{share:.0%}", f"{one.difference:.0e}",
            "\n".join(one.decisions),
        )  # fmt: skip
        good &= one.difference <= SAME
    out.print(table)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.closed_loop", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="cases whose names contain one of these")
    args = parser.parse_args()

    def wanted(name: str) -> bool:
        return args.only is None or any(word in name for word in args.only)

    os.environ.setdefault("RAY_ADDRESS", "local")
    out, progress = Console(width=170), Console(stderr=True)
    cases = [case for case in CASES if wanted(case.name)]
    with redirect_stdout(sys.stderr):
        request = connect(4, emulated=True)
        fleet = start_actors([f"paced · device {d}" for d in range(4)], request, PacedStage)
        try:
            outcomes = [run_case(case, fleet, lambda text: progress.print(text, style="dim")) for case in cases]
        finally:
            fleet.stop()
            ray.shutdown()
    return 0 if show(outcomes, out) else 1


if __name__ == "__main__":
    sys.exit(main())
