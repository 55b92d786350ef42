"""Suggest changes to a job for which no plan fits; only changes that were tested are suggested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, takewhile
from math import ceil

from raypipe.cost.memory.terms import FEWER, RECOMPUTE, SMALLER, STAGES
from raypipe.cost.profile import Profile
from raypipe.errors import ScheduleError
from raypipe.job.spec import JobSpec
from raypipe.plan.candidate import Candidate, Ways, divisors
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.tensor_groups import Judges
from raypipe.schedule.shape import Grid

GIB = 2**30
GROWTH = 1.25
"""Deeper pipelines are tried by growing their depth by this factor, then by bisection."""
NEAREST = 8
"""How many plans, those with the least excess memory, are tried with another optimizer."""
Wished = Callable[[Candidate], Candidate | None]
"""Returns the candidate with the keys that the job fixes applied; None if they exclude it."""


def remedies(job: JobSpec, judge: Judges, tried: Sequence[Prediction], wished: Wished) -> str:
    """List the changes with which the job would fit, joined by "or"; larger devices are always one of them.

    Args:
        job: the job as given.
        judge: predicts memory.
        tried: plans, none of which fits.
        wished: applies the keys that the job fixes.
    """
    nearest = sorted(tried, key=lambda p: p.excess)[:NEAREST]
    least = nearest[0]
    predictor = judge.of(least.candidate)
    found = [f"use devices of {device_gib(predictor.profile, max(least.memory_bytes)):.1f} GiB"]
    given = job.parallel.given if job.parallel.auto else {}
    c = least.candidate
    found += list(_other_wishes(predictor, c, given))
    deeper = None if {"stages", "replicas"} & set(given) else _deeper(judge, c, job.train.batch, wished)
    if deeper is not None:
        found.append(f"{deeper * c.tensor} devices in a pipeline")
    if job.train.optimizer != "sgd":
        plain = job.train.model_copy(update={"optimizer": "sgd"})
        if any(replace(judge.of(p.candidate), train=plain).holds(p.candidate) for p in nearest):
            found.append("train.optimizer: sgd")
    return ", or ".join(found)


def used_up(p: Prediction) -> set[str]:
    """Return the ways to save memory that a plan has used up already."""
    c, form = p.candidate, p.form
    held = [len(p.cut[s]) for row in form.placement for s, device in enumerate(row) if device == p.fullest]
    exhausted = {
        RECOMPUTE: c.recompute != "none" or bool(form.recomputes),
        SMALLER: c.microbatch == 1,
        FEWER: c.microbatches == 1 or c.schedule == "model-parallel",
        STAGES: held == [1],  # one layer
    }
    return {way for way, used in exhausted.items() if used}


def device_gib(profile: Profile, need: float) -> float:
    """Return the device memory in GiB, rounded up to tenths, that holds a plan of ``need`` bytes.

    ``need`` includes what the process takes and what is kept free. On a described device fragmentation and headroom,
    or where these are not described all of it, are a fixed share of the memory, so they grow with the device; the rest,
    and measured ones, stay as they are.
    """
    if profile.source == "analytic" and profile.memory_bytes:
        grows = profile.reserved.fragmentation_bytes + profile.reserved.headroom_bytes or profile.base_bytes
        share = grows / profile.memory_bytes
        need = (need - grows) / (1 - share) if share < 1 else need
    return ceil(10 * need / GIB * (1 - 1e-12)) / 10


def _other_wishes(predictor: Predictor, c: Candidate, given: dict[str, object]) -> Iterator[str]:
    """Yield changes of the ``parallel`` keys that the job fixes, with each of which the plan would fit."""
    if "microbatch" in given:
        share = c.microbatch * c.microbatches
        for size in reversed(divisors(share)):
            if size < c.microbatch and _holds(predictor, c.sized(size, share // size)):
                yield f"parallel.microbatch: {size}"
                break
    if given.get("recompute") == "none" and _holds(predictor, replace(c, recompute="full")):
        yield "parallel.recompute: full"
    if given.get("schedule", "1f1b") not in ("1f1b", "dapple", "auto") and not {"chunks", "unit"} & set(given):
        plain = Candidate.on(c.grid, "1f1b")
        if any(_holds(predictor, replace(plain, recompute=way)) for way in _ways(predictor)):
            yield "parallel.schedule: 1f1b"


def _deeper(judge: Judges, c: Candidate, batch: int, wished: Wished) -> int | None:
    """Return the depth at which a single pipeline fits; None if no cut of the model is fine enough."""
    predictor = judge.of(c)

    def holds(stages: int) -> bool:
        grid = Grid(stages, 1, c.microbatch, batch // c.microbatch, c.tensor, c.sub_pipelined)
        made = [
            wished(Candidate.on(grid, "1f1b")),
            wished(replace(c, stages=stages, replicas=1, microbatches=grid.microbatches)),
        ]
        return any(_holds(predictor, replace(one, recompute=way)) for one in made if one for way in _ways(predictor))

    most, failed = predictor.most_stages, c.stages
    steps = (ceil((c.stages + 1) * GROWTH**k) for k in count())
    for stages in dict.fromkeys([*takewhile(lambda n: n < most, steps), most]):
        if stages <= c.stages:
            continue
        if not holds(stages):
            failed = stages
            continue
        while stages - failed > 1:
            middle = (stages + failed) // 2
            stages, failed = (middle, failed) if holds(middle) else (stages, middle)
        return stages
    return None


def _ways(predictor: Predictor) -> Ways:
    return ("none", "full") if predictor.recompute else ("none",)


def _holds(predictor: Predictor, c: Candidate) -> bool:
    try:
        return c.form.stages <= predictor.most_stages and predictor.holds(c)
    except ScheduleError:
        return False
