"""The worked jobs of ``auto`` (``jobs/auto-*.yaml``) beside what it did not choose, on emulated devices.

    python -m tests.bench.accuracy.worked_jobs [--only NAME ...]

For each job the best plan of every kind that fits is made as ``auto`` makes its own: whole copies, copies that divide
all weights, stages and copies of them, with the devices of a pipeline or of a stage inside hosts, whole or dividing all
weights, one pipeline. Each runs through the real driver, programs and collectives; tasks, messages and collectives last
as the cluster's description says, every time of a job longer by one factor, so that two cores keep up. The plans of a
job take turns. Limits: no plan's measured step is shorter than the chosen one's
by more than ``auto`` itself may give up for a simpler plan, unless the job's keys exclude it, and none differs from its
prediction by more than 3 %.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec, job_from
from raypipe.plan.best_first import NEAR
from raypipe.plan.choose import Decision, choose
from raypipe.plan.online.measured_steps import as_run
from raypipe.plan.plan import build_schedule
from raypipe.plan.predict.orders import Order
from raypipe.runtime.emulation.emulated_run import Rehearsal
from raypipe.schedule.lowering.norm_policy import resolve
from tests.bench.command import options
from tests.bench.turns import Turns, longer, take_turns, worker_group_of
from tests.plan.test_worked_jobs import MACHINES, costed

OFF = 0.03
"""Most that a measured step may differ from its prediction."""


@dataclass(slots=True)
class Entry:
    """One plan of a job; seconds are of the job's own clock."""

    kind: str
    decision: Decision
    excluded: bool = False
    """By the job's own keys."""
    step_s: float = 0.0
    """Of the median turn."""

    @property
    def plan(self) -> str:
        """In words."""
        c = self.decision.best.candidate
        words = [c.schedule, f"{c.stages} x {c.replicas}", f"{c.microbatches} of {c.microbatch}"]
        words += [f"V {c.form.stages // c.stages}"] if c.form.stages > c.stages else []
        words += ["copies inside hosts"] if c.innermost == "replicas" else []
        words += [f"{c.shard}, gather {c.gather}"] if c.shard != "none" else []
        words += [f"recompute {c.recompute}"] if c.recompute != "none" else []
        return ", ".join(words)

    def rehearsal(self, scale: float, job: JobSpec) -> Rehearsal:
        """The step over all devices; every time is ``scale`` times as long."""
        p, plan = self.decision.best, self.decision.plan
        update = p.candidate.update if job.train.needs_norm else "none"
        norm = resolve(update, lambda: Order(plan.one_copy().without({"AR", "U"})).gains_ahead)
        schedule = as_run(build_schedule(plan, job.train.batch))
        return Rehearsal(schedule=schedule, costs=longer(p.costs, scale), copies=p.candidate.replicas, norm=norm)


def kinds(devices: int) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """Kinds of plan, and the ``parallel`` keys of each: of several, the fastest plan stands for the kind."""
    yield "whole copies", [{"stages": 1, "replicas": devices, "shard": "none"}]
    yield "divided copies", [{"stages": 1, "replicas": devices, "shard": "zero3"}]
    deeper = [n for n in range(2, devices) if devices % n == 0]
    hybrid = [{"stages": n, "replicas": devices // n} for n in deeper]
    for words, innermost in (("pipelines inside hosts", "stages"), ("copies inside hosts", "replicas")):
        yield words, [{**keys, "shard": "none", "innermost": innermost} for keys in hybrid]
        yield f"{words}, divided", [{**keys, "shard": "zero3", "innermost": innermost} for keys in hybrid]
    yield "one pipeline", [{"stages": devices, "replicas": 1, "shard": "none"}]


def entries(name: str) -> tuple[JobSpec, list[Entry]]:
    """The job and its plans, the chosen one first."""
    job, profile = costed(name)
    result = [Entry("chosen", choose(job, profile, search_s=0))]
    for kind, ways in kinds(profile.devices):
        fits = []
        for keys in ways:
            other = job_from({**job.model_dump(exclude_unset=True), "parallel": {"auto": True, **keys}})
            with contextlib.suppress(SpecError):
                fits.append(choose(other, profile, search_s=0))
        if not fits:
            print(f"{name:14} {kind:25} does not fit", flush=True)
            continue
        best = Entry(kind, min(fits, key=lambda decision: decision.best.step_s))
        if job.parallel.given.get("shard", best.decision.best.candidate.shard) != best.decision.best.candidate.shard:
            best.kind, best.excluded = f"{kind}, excluded", True
        if best.plan == result[0].plan:
            result[0].kind = f"{kind}, chosen"
        else:
            result.append(best)
    return job, result


def show(name: str, plans: list[Entry]) -> bool:
    """Print a job's plans; whether they are within the limits."""
    chosen, good = plans[0], True
    for one in plans:
        off = one.step_s / one.decision.best.step_s - 1
        good = good and abs(off) <= OFF and (one.excluded or one.step_s >= chosen.step_s * (1 - NEAR))
        print(
            f"{name:14} {one.kind:25} {one.plan:62} predicted {one.decision.best.step_s * 1e3:8.1f} ms, "
            f"measured {one.step_s * 1e3:8.1f} ms ({off:+.1%}), {one.step_s / chosen.step_s:6.2f} of the chosen",
            flush=True,
        )
    return good


def main() -> int:
    """Print a line for each plan; exit status 1 outside the limits."""
    args = options(__doc__, only=MACHINES, seconds=4.0, rounds=1, steps=3)
    good = True
    with worker_group_of(max(MACHINES[name][1] for name in args.only)) as workers:
        for name in args.only:
            job, plans = entries(name)
            scale = args.seconds / plans[0].decision.best.step_s  # so long lasts the chosen plan's emulated step
            turns = [Turns(one.rehearsal(scale, job)) for one in plans]
            take_turns(turns, args.rounds, args.steps, workers)
            for one, own in zip(plans, turns, strict=True):
                one.step_s = own.step_s / scale
            good = show(name, plans) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
