"""Search orders (``raypipe.search``) for the placements of the best candidates, with their costs and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from raypipe.errors import ScheduleError
from raypipe.plan.candidate import Candidate
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor
from raypipe.plan.tensor_groups import Judges
from raypipe.schedule.ir import Rules
from raypipe.schedule.shape import Shape
from raypipe.search import search
from raypipe.search.placements import placed

PLACEMENTS = 3
"""How many placements are searched."""
MOST_TASKS = 20_000
"""Steps with more tasks are skipped: a second or two of search would not suffice."""
GAIN = 1e-3
"""A searched order must save more than this share of the step to be worth a longer plan file."""


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
    found = []
    for n, (like, c) in enumerate(targets):
        budget = (until - time.monotonic()) / (len(targets) - n)
        if budget <= 0:
            break
        other = _searched(judges.of(c), like, c, budget)
        if other is not None and other.fits and (not better or other.step_s < ranked[0].step_s * (1 - GAIN)):
            found.append(other)
    return found


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
        found = search(
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
    return judge.predict_order(limited, replace(found.schedule, name="auto"))
