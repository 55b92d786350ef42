"""Search orders, and positions of gathers, for the best plans (``raypipe.search``).

Orders are searched for the placements of the best candidates, with their costs and memory. Gathers are searched for
plans whose copies divide their weights: between one a step and one every micro-batch, within the memory of each device.
The policies are tried as well, under the same memory model, so what comes out is slower than none of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from raypipe.cost.memory import parameter_bytes, stage_memory
from raypipe.errors import ScheduleError
from raypipe.plan.candidate import GATHERS, Candidate, unit_sizes
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.shard_ways import CHUNKED
from raypipe.plan.tensor_groups import Judges
from raypipe.schedule.ir import Rules, Schedule, Sharding
from raypipe.schedule.passes.shard import place
from raypipe.schedule.shape import Shape
from raypipe.search import search
from raypipe.search.budget import Budget
from raypipe.search.gather_positions import search_gathers
from raypipe.search.placements import placed

PLACEMENTS, PLANS = 3, 2
"""How many placements are searched for orders, and how many plans for gathers."""
MOST_TASKS, MOST_GATHER_TASKS = 20_000, 6_000
"""Steps with more tasks are skipped: a second or two would suffice neither for orders nor for gathers."""
GAIN = 1e-3
"""An order, or positions of gathers, must save more than this share of the step to be worth a longer plan file."""


def searched_orders(
    judges: Judges, ranked: Sequence[Prediction], seconds: float, better: bool = True
) -> list[Prediction]:
    """Search orders for the placements of the best candidates.

    Args:
        judges: predicts costs and memory.
        ranked: candidates, the best first.
        seconds: wall time of all searches together.
        better: return only orders that beat the best candidate.
    """
    until = time.monotonic() + seconds
    targets = list(_targets(judges, ranked))[:PLACEMENTS]
    result = []
    for n, (like, c) in enumerate(targets):
        budget = (until - time.monotonic()) / (len(targets) - n)
        if budget <= 0:
            break
        other = _searched(judges.of(c), like, c, budget)
        if other is not None and other.fits and (not better or other.step_s < ranked[0].step_s * (1 - GAIN)):
            result.append(other)
    return result


def _targets(judges: Judges, ranked: Sequence[Prediction]) -> Iterator[tuple[Prediction, Candidate]]:
    """Yield each placement once: a candidate that has it, and the ``auto`` candidate to search."""
    seen: set[object] = set()
    for p in ranked:
        c = p.candidate
        if (
            c.stages == 1
            or c.shard != "none"
            or p.form.versions != "flush"
            or p.keep is not None
            or p.recomputed is not None
            or c.balance == "memory"
        ):
            continue
        for name, chunks, pipelines in (
            ("line", 1, 2),
            ("v", 2, 2),
            ("ring", c.chunks, 2),
            ("bidirectional", 1, c.pipelines),
        ):
            try:
                rows = placed(
                    name, Shape(devices=c.stages, microbatches=c.microbatches, chunks=chunks, pipelines=pipelines)
                )
            except ScheduleError:
                continue
            what = (rows, c.grid)
            stages = len(rows[0])
            if what in seen or stages > judges.of(c).most_stages or 3 * stages * c.microbatches > MOST_TASKS:
                continue
            if rows == p.form.placement:
                seen.add(what)
                yield (
                    p,
                    Candidate.on(
                        c.grid,
                        "auto",
                        chunks=chunks,
                        pipelines=pipelines,
                        placement=name,
                        balance=c.balance,
                        innermost=c.innermost,
                    ),
                )


def _searched(judge: Predictor, like: Prediction, c: Candidate, seconds: float) -> Prediction | None:
    form = replace(like.form, joint=False)
    costs = judge.costs(c, form)
    room = judge.room(like)
    most = max(like.form.replicas, 1) * c.microbatches * like.form.stages  # no order holds more activations
    limit = float(room) if room < most else None
    try:
        result = search(
            like.form.placement,
            c.microbatches,
            costs,
            memory_limit=limit,
            budget_s=seconds,
            rules=Rules(frozen=judge.frozen(judge.cut(c, form))),
            starts=[judge.schedule_of(like)],
        )
    except ScheduleError:  # not even one micro-batch fits
        return None
    limited = replace(c, memory_limit=limit) if limit is not None else c
    return judge.predict_order(limited, replace(result.schedule, name="auto"))


def searched_gathers(judges: Judges, ranked: Sequence[Prediction], seconds: float) -> list[Prediction]:
    """Search the gathers of the best plans that have any.

    Args:
        judges: predicts costs and memory.
        ranked: plans that fit, the best first.
        seconds: of all searches together, of this thread's CPU time.
    """
    targets = [p for p in ranked if p.candidate.level == 3 and p.order is None and p.fits]
    targets = [p for p in targets if 3 * p.form.stages * p.candidate.microbatches <= MOST_GATHER_TASKS][:PLANS]
    result = (better_gathers(judges.of(p.candidate), p, seconds / len(targets)) for p in targets)
    return [other for p, other in zip(targets, result, strict=True) if other is not p]


def better_gathers(judge: Predictor, p: Prediction, seconds: float) -> Prediction:
    """Return the fastest plan that fits and differs from a plan of level 3 in its gathers, or in the order between
    them; the plan itself if none is faster by more than ``GAIN``."""
    best = p
    for gather in GATHERS:
        if gather not in ("order", p.candidate.gather):
            other = judge.predict(replace(p.candidate, gather=gather))
            if other.fits and other.step_s < best.step_s * (1 - GAIN):
                best = judge.time(other, final=True)
    orders, rooms, plans = [], [], []
    for like in (p, *_siblings(judge, p)):
        bare = judge.bare(like)
        orders.append(bare)
        rooms.append(_rooms(judge, like, bare))
        plans.append(like)
    count = p.candidate.microbatches
    units = {u for u in (plan.candidate.unit for plan in plans) if u is not None and u < count}
    try:
        result = search_gathers(
            orders,
            rooms,
            p.costs,
            _sizes(judge, p),
            sharding=_sharding(p),
            units=sorted(units),
            budget=Budget(seconds),
        )
    except ScheduleError:  # not even one stage fits beside the most that everything else takes at any moment
        return best
    other = judge.predict_gathers(plans[result.order], result.schedule)
    return other if other.fits and other.step_s < best.step_s * (1 - GAIN) else best


def _siblings(judge: Predictor, p: Prediction) -> Iterator[Prediction]:
    """Plans of the same tasks on the same placement, in another order."""
    c = p.candidate
    if p.keep is not None or p.recomputed is not None:
        return
    others: list[Candidate] = []
    if c.schedule in CHUNKED and "schedule" not in judge.asked:
        others = [replace(c, schedule=name) for name in CHUNKED]
    elif c.unit is not None and "unit" not in judge.asked:
        others = [replace(c, unit=unit) for unit in unit_sizes(c.stages, c.microbatches)]
    for other in others:
        if other != c:
            try:
                result = judge.predict(other)
            except ScheduleError:
                continue
            if result.form.placement == p.form.placement and result.form.joint == p.form.joint and result.cut == p.cut:
                yield result


def _sharding(p: Prediction) -> Sharding:
    return Sharding(levels=(3,) * p.form.stages, group=p.candidate.shard_replicas)


def _rooms(judge: Predictor, p: Prediction, bare: Schedule) -> list[float]:
    """Per device, what gathered weights and full gradients may take at any moment."""
    sharding = _sharding(p)
    scattered = place(replace(bare, sharding=sharding), sharding, [{} for _ in bare.orders], 1)
    held = judge.beside_shards(p, scattered)
    return [max(0.0, most - own) for most, own in zip(p.capacities, held, strict=True)]


def _sizes(judge: Predictor, p: Prediction) -> list[float]:
    """Per stage, what it takes gathered, with autocast's narrow copies, or its full gradients, if that is more."""
    profile, train, form = judge.profile, judge.train, p.form
    each = parameter_bytes(profile.dtype, train.optimizer, train.momentum)
    samples = p.candidate.microbatch * float(form.size)
    stages = [stage_memory(profile, layers, samples, each, split=not form.joint) for layers in p.cut]
    return [max(stage.weights + stage.casts - 2 * stage.narrow, stage.gradients) for stage in stages]
