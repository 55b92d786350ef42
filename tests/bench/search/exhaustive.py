"""``choose`` against all candidates of its space, each ordered, placed in memory and timed."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from raypipe.cost.profile import LinkFit, Profile
from raypipe.errors import ScheduleError, SpecError
from raypipe.job.spec import JobSpec
from raypipe.plan.candidate import Candidate, divisors, grids
from raypipe.plan.choose import choose
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.shard_ways import WORDS
from raypipe.plan.tensor_groups import ALONE, Judges, Sharing
from raypipe.schedule import SCHEDULES
from raypipe.schedule.shape import NEUTRAL, Grid
from tests.bench.search.line import Effort, Line
from tests.plan.conftest import make_job, make_profile, make_shared

LONGER, TIGHT = 0.01, (2.0, 1.0, 0.85, 0.7, 0.55)
"""What a chosen plan's step may take more; shares of the memory of whole copies with the smallest micro-batches."""
LARGEST = 8


class Small(NamedTuple):
    job: JobSpec
    profile: Profile
    shared: dict[Sharing, Profile]
    about: str


def small(seed: int) -> Small:
    """A random small model on a small cluster, with plenty of memory or little."""
    rng = random.Random(seed)
    layers, devices, batch = rng.randint(2, 5), rng.choice((2, 3, 4)), rng.choice((4, 6, 8))
    job = make_job(layers, batch, clip=rng.choice((None, 1.0)))
    rate = 10 ** rng.uniform(8.0, 10.5)
    changes: dict[str, Any] = {
        "inside": LinkFit(alpha_s=2e-5, beta_s_per_byte=1 / rate),
        "between": LinkFit(alpha_s=1e-4, beta_s_per_byte=rng.choice((1, 4, 16)) / rate),
        "update_s_per_parameter": rng.choice((2e-10, 2e-9)),
    }
    roomy = make_profile(layers, devices, seed, **changes)
    share, copies = rng.choice(TIGHT), max(n for n in divisors(batch) if n <= devices)
    whole = Candidate.on(Grid(1, copies, 1, batch // copies), "1f1b")
    needed = max(Predictor(roomy, job.train, layers).predict(whole).memory_bytes)
    profile = make_profile(layers, devices, seed, memory_bytes=share * needed, **changes)
    shared = (
        {Sharing(2, halves): make_shared(profile, 2, halves) for halves in (False, True)} if rng.random() < 0.3 else {}
    )
    about = f"{layers} layers, {devices} devices, {batch} samples, {share:.0%} of the memory"
    return Small(job, profile, shared, about + (", groups" if shared else ""))


def shards(c: Candidate, judge: Predictor) -> Iterator[Candidate]:
    """The candidate with everything its copies may divide, and every way to gather; not those alone that pay."""
    yield c
    if c.replicas == 1 or c.tensor > 1:
        return
    ways = {replace(way, shard_replicas=None, shard="none", gather="unit") for way in judge.shard_ways(c)} | {
        replace(c, update="wait")
    }
    for way in ways:
        for group in (n for n in divisors(c.replicas) if n > 1):
            divided = replace(way, shard_replicas=None if group == c.replicas else group)
            for level in (1, 2, 3):
                for gather in ("unit", "microbatch", "step") if level == 3 else ("unit",):
                    yield replace(divided, shard=WORDS[level], gather=gather)  # type: ignore[arg-type]


def leaner(c: Candidate, judge: Predictor) -> Iterator[Candidate]:
    """All that takes memory from a candidate: recomputation, limits, and waiting for the norm."""
    recomputed = ["none"] if c.form.recomputes else ["none", "microbatches"] + ["layers"] * (not c.sub_pipelined)
    told = "memory_limit" in SCHEDULES[c.schedule].options and c.unit is None
    for way in recomputed:
        for update in dict.fromkeys((c.update, "wait")):
            for limit in (None, 2.0, 3.0, 4.0, 5.0) if told else (None,):
                one = replace(c, recompute=way, update=update, memory_limit=limit)  # type: ignore[arg-type]
                if one != c:
                    yield one


def every(case: Small) -> Iterator[Prediction]:
    """All candidates that fit, timed; of one that does not, what needs less memory."""
    train, layers = case.job.train, len(case.profile.layers) - 2
    profiles = {ALONE: case.profile, **case.shared}
    judge = Judges({key: Predictor(own, train, layers, divides=key == ALONE) for key, own in profiles.items()})
    for sharing in profiles:
        for grid in grids(case.profile.devices, train.batch, layers, 1, LARGEST, *sharing):
            own = judge.of(grid)
            for c in own.on(grid):
                if c.form.versions != "flush":
                    continue
                for way in shards(c, own):
                    fitting = list(predicted(own, [way]))
                    yield from fitting or predicted(own, leaner(way, own))


def predicted(judge: Predictor, ways: Any) -> Iterator[Prediction]:
    """Those that exist and fit, also with balanced devices."""
    for way in ways:
        for c in (way, judge.recut(way) if way.recompute == "none" else None):
            try:
                p = None if c is None else judge.predict(c)
            except ScheduleError:  # a limit that the family cannot keep
                continue
            if p is not None and p.fits:
                yield judge.time(p, final=True)


def candidates(effort: Effort) -> Iterator[Line]:
    """A line for each case whose plan is not the fastest, then the median and the worst."""
    longer, timed, began = [], 0, time.process_time()
    for seed in range(effort.first, effort.first + effort.count):
        case = small(seed)
        all_of_them = list(every(case))
        timed += len(all_of_them)
        try:
            chosen = choose(case.job, case.profile, top=1, search_s=0, shared=case.shared).best
        except SpecError as error:
            if all_of_them:
                yield Line(f"{seed} {case.about}: {error.why}, and {len(all_of_them)} candidates fit", 1.0)
            continue
        if not all_of_them:
            longer.append(0.0)
            continue
        best = min(all_of_them, key=lambda p: p.step_s)
        longer.append(max(0.0, chosen.step_s / best.step_s - 1))
        if longer[-1] > 1e-6:
            yield Line(
                f"{seed} {case.about}: {longer[-1]:.3%} longer: {words(chosen)}, not {words(best)}", longer[-1], LONGER
            )
    yield Line(
        f"{len(longer)} cases, {timed} candidates fit and were timed: median {statistics.median(longer):.2%}, worst "
        f"{max(longer):.2%}, {sum(share <= 1e-6 for share in longer)} are the fastest; "
        f"{time.process_time() - began:.0f} s of processor time", statistics.median(longer),
    )  # fmt: skip


def words(p: Prediction) -> str:
    """A plan's decisions, for people."""
    c = p.candidate
    options = {key: value for key, value in c.options.items() if value != NEUTRAL[key]}
    more = [c.shard, c.recompute, c.update, c.balance, *(f"{key} {value}" for key, value in options.items())]
    more += [c.innermost, f"group {c.shard_replicas}", f"gather {c.gather}", *["halves"] * c.sub_pipelined]
    return f"{c.schedule} {c.stages} x {c.replicas} x {c.tensor} B {c.microbatch} ({', '.join(map(str, more))})"
