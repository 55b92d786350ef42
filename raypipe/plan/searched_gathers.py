"""Search gather positions (``raypipe.search.gather_positions``) for the best plans whose copies divide their weights.

Between a gather once a step and one every micro-batch, within the memory of each device. The policies are tried as
well, under the same memory model, so what comes out is slower than none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from raypipe.cost.memory import parameter_bytes, stage_memory
from raypipe.errors import ScheduleError
from raypipe.plan.candidate import GATHERS, Candidate, unit_sizes
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.shard_ways import CHUNKED
from raypipe.plan.tensor_groups import Judges
from raypipe.schedule.ir import Schedule, Sharding
from raypipe.schedule.passes.shard import place
from raypipe.search.budget import Budget
from raypipe.search.gather_positions import search_gathers

PLANS = 2
"""How many plans are searched."""
MOST_TASKS = 6_000
"""Steps with more tasks are skipped: a second or two would time too few placements."""
GAIN = 1e-3
"""Positions of their own must save more than this share of the step to be worth a longer plan file."""


def searched_gathers(judges: Judges, ranked: Sequence[Prediction], seconds: float) -> list[Prediction]:
    """Search the gathers of the best plans that have any.

    Args:
        judges: predicts costs and memory.
        ranked: plans that fit, the best first.
        seconds: of all searches together, of this thread's CPU time.
    """
    targets = [p for p in ranked if p.candidate.level == 3 and p.order is None and p.fits]
    targets = [p for p in targets if 3 * p.form.stages * p.candidate.microbatches <= MOST_TASKS][:PLANS]
    found = (better_gathers(judges.of(p.candidate), p, seconds / len(targets)) for p in targets)
    return [other for p, other in zip(targets, found, strict=True) if other is not p]


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
        found = search_gathers(
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
    other = judge.predict_gathers(plans[found.order], found.schedule)
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
                found = judge.predict(other)
            except ScheduleError:
                continue
            if found.form.placement == p.form.placement and found.form.joint == p.form.joint and found.cut == p.cut:
                yield found


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
    return [max(stage.weights + stage.casts, stage.gradients) for stage in stages]
