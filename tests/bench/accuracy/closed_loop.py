"""Does the closed loop pay? ``python -m tests.bench.accuracy.closed_loop``. Wants a quiet machine.

Plans made with wrong costs run on a machine whose right ones are known (``paced.py``: the real driver and
stage actors train a small model in float64, every task, message and gradient sum lasting a set time). Beside each run
with ``parallel.replan`` stand two without: the same plan left alone, and the plan that the planner makes from the right
costs. Also a machine that changes in the middle of a run; every family with right costs, where nothing is to be gained
and nothing should be swapped; and real CPU runs at their own speed. All losses must be equal to 1e-9.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import ray
from rich.console import Console

from raypipe.checkpoint import step_directory
from raypipe.data import declared_fields, prepare_data
from raypipe.job.spec import JobSpec, job_from
from raypipe.models import build_model
from raypipe.observe.run_log import EVENTS, METRICS, RunLog, read_rows
from raypipe.plan.online.better_order import OBJECTIVES, SYNCS, runs_ahead, step_seconds
from raypipe.plan.plan import Plan, build_schedule, load_plan
from raypipe.runtime.cluster.connect import connect
from raypipe.runtime.driver import Driver
from raypipe.runtime.hosts.reserve import reserve
from raypipe.runtime.worker.worker import StageWorker
from raypipe.runtime.worker.worker_group import WorkerGroup, start_worker_group
from raypipe.schedule.costs import CostTable
from raypipe.schedule.live_activations import peak_activations
from raypipe.search import search
from raypipe.train import make_plan, with_plan
from tests.bench.accuracy.paced import Pace, PacedStage
from tests.bench.command import options
from tests.bench.turns import first, table

MS = 1e-3
SAME = 1e-9
"""Largest difference of two losses."""
SEARCH_S = 6.0
"""For the plan from the right costs."""
LAST = 10
"""Steps at the end of a run whose median is its step."""
TASK = 5 * MS
SHORT = 30
"""Steps of the plan left alone."""
NOISE = 0.05
"""Of task times, where the costs are right."""


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
    steps: int = 80
    train: dict[str, Any] = field(default_factory=dict)
    noise: float = 0.0
    slower: dict[int, float] = field(default_factory=dict)
    """Devices that take longer for everything."""
    layers: int = 2
    """For each device."""
    alone: dict[str, Any] = field(default_factory=dict)
    right: dict[str, Any] = field(default_factory=dict)
    """Keys of ``parallel`` where these runs differ beside the order."""
    model: dict[str, Any] = field(default_factory=dict)
    resumes: bool = False
    """Begin again from a checkpoint after the first swap, with the plan that the run left in its directory."""

    def job(self, steps: int, **keys: Any) -> JobSpec:
        """As a job file would say it."""
        parallel = {"microbatch": 2, **self.parallel, **keys}
        copies = parallel.get("replicas", 1)
        stages = parallel["stages"] * max(self.layers, parallel.get("chunks", 1))
        return job_from(
            {
                "name": "closed-loop",
                "model": {
                    "type": "gpt", "layers": stages, "hidden": 16, "heads": 2, "sequence": 16, "vocabulary": 256,
                    "tie_embeddings": False, **self.model,
                },
                "data": {"type": "bytes", "path": "stdlib"},
                "train": {
                    "steps": steps, "batch": self.microbatches * parallel["microbatch"] * copies, "lr": 0.003,
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
    driver: Driver

    def step_s(self, until: int | None = None) -> float:
        """Median of the last steps, or of those before ``until``."""
        return median(self.steps_s[:until][-LAST:])


def drive(
    job: JobSpec, plan: Plan, paces: Sequence[Pace], workers: WorkerGroup, directory: Path, done: int = 0
) -> Ran:  # fmt: skip
    """Train on the first of the fleet's actors, from the checkpoint after ``done`` steps that ``directory`` holds."""
    job = with_plan(job, plan)
    schedule = build_schedule(plan, job.train.batch)
    workers = first(workers, schedule.devices)
    if paces:
        ray.get([actor.set_pace.remote(paces, float(schedule.size)) for actor in workers.actors])
    directory.mkdir(exist_ok=True)
    if not done:
        prepare_data(job, build_model(job, declared_fields(job.data)).task, directory / "data")
        plan.save(directory / "plan.json")
    before = len(read_rows(directory / METRICS))
    log = RunLog(directory)
    driver = Driver(job, plan, directory, log, lambda *_: None)
    driver.run(workers, step_directory(directory / "checkpoints", done) if done else None, done)
    rows = [row for row in read_rows(directory / METRICS)[before:] if "loss" in row]
    return Ran([r["loss"] for r in rows], [r["step_s"] for r in rows], read_rows(directory / EVENTS), driver)


def plan_for(job: JobSpec, plan: Plan, costs: CostTable) -> Plan:
    """What the planner makes of the same placement and memory from these costs: an order searched for where backwards
    are split, and where gradients are summed."""
    clips = job.train.clip is not None
    base = plan.order().without({"R"})
    orders = [plan.order()]
    if any(t.kind == "W" for t in base.tasks()):
        limits = peak_activations(base)
        for objective in OBJECTIVES:
            result = search(
                base.placement, base.microbatches, costs, memory_limit=limits, objective=objective,
                budget_s=SEARCH_S / len(OBJECTIVES), starts=[base],
            )  # fmt: skip
            orders.append(replace(result.schedule, name=base.name))
    several = build_schedule(plan, job.train.batch).replicas > 1

    def seconds(candidate: Plan) -> float:
        schedule = build_schedule(candidate, job.train.batch)
        return step_seconds(schedule, costs, clips, runs_ahead(candidate.parallel, clips, schedule, costs))

    return min(
        (
            plan.remade(job.train.batch, order, sync=sync)
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
    schedule = plan.order()
    result = search(
        schedule.placement, schedule.microbatches, believed, memory_limit=job.parallel.memory_limit, budget_s=3.0
    )  # fmt: skip
    return plan.remade(job.train.batch, replace(result.schedule, name="auto"))


@dataclass(slots=True)
class Outcome:
    """Three runs of a case."""

    case: Case
    alone: Ran
    right: Ran
    loop: Ran
    resumed: Ran | None = None

    @property
    def difference(self) -> float:
        """Largest of two losses of the same step."""
        pairs = [
            *zip(self.loop.losses, self.alone.losses, strict=False),
            *zip(self.loop.losses, self.right.losses, strict=True),
        ]
        if self.resumed is not None:
            again = self.resumed.losses
            pairs += zip(self.loop.losses[-len(again) :], again, strict=True)
        return max(abs(a - b) for a, b in pairs)

    @property
    def decisions(self) -> list[str]:
        """In words."""
        lines = [line for event in self.loop.events if (line := told(event)) is not None]
        return [*lines, f"resumed: {len(self.resumed.losses)} steps"] if self.resumed is not None else lines


def told(event: dict[str, Any]) -> str | None:
    """A decision of the loop."""
    kind, at = event["event"], event.get("step")
    if kind == "replanned":
        return f"step {at}: {event['change']}; predicted {event['gain']:+.1%}"
    if kind == "realised":
        gains = f"{event['gain']:+.1%} (predicted {event['predicted_gain']:+.1%})"
        return f"step {at}: realised {gains} over {event['steps']} steps"
    if kind == "kept":
        return f"step {at}: kept, {event['reason']} ({event['gain']:+.1%})"
    if kind == "drifted":
        return f"step {at}: drifted from {event['was_s'] / MS:.0f} to {event['now_s'] / MS:.0f} ms"
    if kind == "refitted":
        return f"step {at}: {event['task']} of stage {event['stage']} x{event['ratio']:.2f}"
    if kind == "reverted":
        return f"step {at}: went back"
    if kind == "restored":
        return f"step {at}: taken up again, {event['gain']:+.1%}"
    if kind == "recompute":
        line = f"step {at}: alpha {event['alpha']:.2f}, {event['peak_mb']:.1f} MB, next {event['next']:.2f}"
        if "realised_gain" in event:
            line += f"; realised {event['realised_gain']:+.1%} (predicted {event['predicted_gain']:+.1%})"
        return line
    return None


AUTO = {"schedule": "auto", "stages": 4, "memory_limit": 5}
CASES = (
    Case("stage 2 takes 1.5 times as long", AUTO, 6, lambda n: slower(even(n), 2, 1.5), resumes=True,
         train={"checkpoint_every": 40}),
    Case("a slow link", AUTO, 6, lambda n: replace(even(n), comm=(0.0, 2.5 * TASK, 0.0))),
    Case("zeropp, a message takes as long as a task", {"schedule": "zeropp", "stages": 2, "chunks": 2, "unit": 2}, 4,
         lambda n: CostTable.even(n, TASK, TASK, TASK, comm=TASK)),
    Case("zb-h1, stage 1 takes 1.5 times as long", {"schedule": "zb-h1", "stages": 4}, 4,
         lambda n: slower(even(n), 1, 1.5)),
    Case("slow gradient sums", {"schedule": "interleaved-1f1b", "stages": 2, "chunks": 2, "replicas": 2}, 4,
         lambda n: replace(even(n), all_reduce=(4 * TASK,) * n), steps=60),
    Case("clipped, stage 2 takes 1.5 times as long", AUTO, 6, lambda n: slower(even(n), 2, 1.5), train={"clip": 1.0}),
    Case("more memory than was thought", {"schedule": "1f1b", "stages": 4, "recompute": "stage-aware"}, 6,
         lambda n: CostTable.even(n, TASK, TASK, TASK, TASK), layers=4, steps=60,
         right={"alphas": 1.0}, alone={"alphas": 0.0}),
    Case("stage 1 slower from step 60 on", AUTO, 6, even, then=lambda n: slower(even(n), 1, 1.5), steps=135),
)  # fmt: skip
RIGHT = (
    *(Case(name, {"schedule": name, "stages": 4}, 4, even) for name in (
        "gpipe", "1f1b", "chimera", "chimera-tight", "gems", "zb-h1", "zb-h2", "early-recompute",
        "shifted-critical-path", "model-parallel")),
    *(Case(name, {"schedule": name, "stages": 2, "chunks": 2}, 4, even) for name in (
        "interleaved-1f1b", "bfs", "zb-v", "fast-forward", "modulo")),
    Case("zeropp", {"schedule": "zeropp", "stages": 2, "chunks": 2, "unit": 4, "replicas": 2}, 4, even),
    Case("auto", AUTO, 4, even),
    Case("one device, gradients accumulated", {"schedule": "1f1b", "stages": 1}, 4, even),
    Case("data parallel", {"schedule": "gpipe", "stages": 1, "replicas": 4}, 4,
         lambda n: replace(even(n), all_reduce=(2 * TASK,) * n)),
    Case("1f1b, one replica slower", {"schedule": "1f1b", "stages": 2, "replicas": 2}, 4, even, slower={3: 1.4}),
)  # fmt: skip
"""Every family that flushes, on the costs that it was made for; times vary."""


REAL = (
    Case("real: order for a first stage three times as slow", {"schedule": "auto", "stages": 2, "memory_limit": 4}, 8,
         lambda n: slower(even(n), 0, 3.0), layers=4, model={"hidden": 128, "sequence": 64}),
    Case("real: zb-h1, nothing wrong", {"schedule": "zb-h1", "stages": 2}, 8, even, layers=4,
         model={"hidden": 128, "sequence": 64}),
)  # fmt: skip
"""At the machine's own speed; ``truth`` is what the order was made for."""


def run_real(case: Case, workers: WorkerGroup, where: Path, say: Callable[[str], None]) -> Outcome:
    """As ``run_case``; the right plan is made from what the plan left alone measured."""
    job = case.job(case.steps, replan=False)
    plan = searched_for(job, case.truth(len(make_plan(job).cut)))
    say(f"{case.name}: left alone")
    alone = drive(job, plan, (), workers, where / "alone")
    say(f"{case.name}: right from the start")
    measured = alone.driver.clock.prediction
    assert measured is not None
    right = drive(job, plan_for(job, plan, measured.costs), (), workers, where / "right")
    say(f"{case.name}: planned again")
    job = case.job(case.steps, replan=True)
    again = Plan.of(job.parallel, plan.cut, job.train.batch, plan.order(), plan.frozen)
    loop = drive(job, again, (), workers, where / "loop")
    return Outcome(case, alone, right, loop)


def paces_of(case: Case, stages: int) -> list[Pace]:
    """The machine."""
    paces = [Pace(costs=case.truth(stages), noise=case.noise, slower=case.slower)]
    if case.then is not None:
        paces.append(replace(paces[0], costs=case.then(stages), first_step=case.change))
    return paces


def run_case(case: Case, workers: WorkerGroup, where: Path, say: Callable[[str], None]) -> Outcome:
    """The plan left alone, the right plan, and the loop."""
    share = case.parallel.get("recompute") == "stage-aware"
    job = case.job(SHORT, replan=False, **case.alone)
    stages = len(make_plan(job).cut)
    plan = searched_for(job, even(stages))
    paces = paces_of(case, stages)
    until = case.change + SHORT if case.then is not None else SHORT
    say(f"{case.name}: left alone")
    alone = drive(case.job(until, replan=False, **case.alone), plan, paces, workers, where / "alone")
    job = case.job(case.steps, replan=False, **case.right)
    say(f"{case.name}: right from the start")
    best = plan_for(job, make_plan(job) if share else plan, paces[-1].costs)
    right = drive(job, best, paces, workers, where / "right")
    say(f"{case.name}: planned again")
    job = case.job(case.steps, replan=True, **({"memory_cap_mb": 1e6} if share else {}))
    again = Plan.of(job.parallel, plan.cut, job.train.batch, plan.order(), plan.frozen)
    outcome = Outcome(case, alone, right, drive(job, again, paces, workers, where / "loop"))
    for line in outcome.decisions:
        say(f"  {line}")
    if case.resumes:
        say(f"{case.name}: resumed")
        half = case.steps // 2
        outcome.resumed = drive(job, load_plan(where / "loop" / "plan.json"), paces, workers, where / "loop", half)
    return outcome


def count_swaps(case: Case, workers: WorkerGroup, where: Path, say: Callable[[str], None]) -> Ran:
    """A run with right costs."""
    say(f"right costs: {case.name}")
    job = case.job(60 + LAST, replan=True)
    plan = make_plan(job)
    paces = [replace(pace, noise=NOISE) for pace in paces_of(case, len(plan.cut))]
    return drive(job, searched_for(job, even(len(plan.cut))), paces, workers, where)


def show_right(ran: list[tuple[Case, Ran]]) -> None:
    """Print what was swapped though nothing was to be gained."""
    rows = []
    for case, one in ran:
        lines = [line for event in one.events if (line := told(event)) is not None]
        swaps = sum(event["event"] in ("replanned", "reverted", "restored") for event in one.events)
        rows.append((case.name, "\n".join(lines), f"{one.step_s() / MS:.1f}", str(swaps)))
    columns = ("schedule", "decisions", "step, ms", "swaps")
    table(f"right costs, times that vary by {NOISE:.0%}", columns, rows, words=2)


def show(outcomes: list[Outcome]) -> bool:
    """Print the table; whether all losses are equal and no run ended slower than it began."""
    rows, good = [], True
    for one in outcomes:
        alone, loop, right = (r.step_s() / MS for r in (one.alone, one.loop, one.right))
        share = (alone - loop) / (alone - right) if alone > right else 1.0
        rows.append((
            one.case.name, "\n".join(one.decisions), f"{alone:.1f}", f"{loop:.1f}", f"{right:.1f}", f"{share:.0%}",
            f"{one.difference:.0e}",
        ))  # fmt: skip
        good &= one.difference <= SAME
    columns = ("what is wrong", "decisions", "left alone", "planned again", "right plan", "recovered", "loss diff")
    table("plans made for wrong costs; step in milliseconds", columns, rows, words=2)
    return good


def main() -> int:
    args = options(__doc__, only=())  # words of cases' names

    def wanted(name: str) -> bool:
        return not args.only or any(word in name for word in args.only)

    os.environ.setdefault("RAY_ADDRESS", "local")
    progress = Console(stderr=True)

    def say(text: str) -> None:
        progress.print(text, style="dim")

    cases, right = [c for c in CASES if wanted(c.name)], [c for c in RIGHT if wanted(c.name)]
    real = [c for c in REAL if wanted(c.name)]
    with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory(prefix="raypipe-loop-") as name:
        where = Path(name)
        outcomes: list[Outcome] = []
        ran: list[tuple[Case, Ran]] = []
        if cases or right:
            workers = start_worker_group(
                [f"paced · device {d}" for d in range(4)], reserve(4, connect(4, emulated=True), 120.0), PacedStage
            )
            try:
                outcomes = [run_case(case, workers, _new(where, f"wrong-{i}"), say) for i, case in enumerate(cases)]
                ran = [(case, count_swaps(case, workers, where / f"right-{i}", say)) for i, case in enumerate(right)]
            finally:
                workers.stop()
                ray.shutdown()
        if real:
            workers = start_worker_group([f"device {d}" for d in range(2)], reserve(2, connect(2), 120.0), StageWorker)
            try:
                outcomes += [run_real(case, workers, _new(where, f"real-{i}"), say) for i, case in enumerate(real)]
            finally:
                workers.stop()
                ray.shutdown()
    good = True
    if outcomes:
        good = show(outcomes)
    if ran:
        show_right(ran)
    return 0 if good else 1


def _new(where: Path, name: str) -> Path:
    (where / name).mkdir()
    return where / name


if __name__ == "__main__":
    sys.exit(main())
