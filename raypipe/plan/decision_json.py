"""The planner's decision as JSON (CONTRACT.md), and predictions of Chimera's closed-form model for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raypipe.cost.chimera_model import Difference, closed_form, differences
from raypipe.plan.candidate import Recompute
from raypipe.plan.choose import Decision, Row, label
from raypipe.plan.plan import sharded
from raypipe.plan.predict.orders import Orders
from raypipe.plan.predict.prediction import Prediction
from raypipe.schedule.ir import Schedule

MOST_TASKS = 60_000
"""Steps with more tasks are not compared with Eq. 1, because that simulates them task by task."""


def as_json(decision: Decision, tokens: int | None = None) -> dict[str, Any]:
    """Return the object that ``raypipe autoconfigure --json`` prints; CONTRACT.md defines it.

    Args:
        decision: what was chosen.
        tokens: of a sample; None where samples have none.
    """
    devices = decision.plan.parallel.devices
    return {
        "best": decision.plan.model_dump(mode="json"),
        "candidates": [_candidate(row) for row in decision.rows],
        "searched": decision.searched,
        "timed": decision.timed,
        "seconds": decision.seconds,
        "search_s": decision.seconds,
        "tokens_per_s_per_device": None if tokens is None else decision.best.throughput * tokens / devices,
        "memory": _memory(decision.best),
        "notes": list(decision.notes),
    }


def _memory(p: Prediction) -> list[dict[str, float]]:
    """Return what the plan puts on each device, what is kept from tensors there, and the rest of its memory."""
    own = [
        {
            "planned_bytes": memory.planned,
            "reserved_bytes": memory.reserved,
            "usable_bytes": capacity - memory.reserved,
        }
        for memory, capacity in zip(p.memory, p.capacities, strict=True)
        for _ in range(p.candidate.tensor)
    ]
    return [{"device": device, **row} for device, row in enumerate(own * p.candidate.replicas)]


def _candidate(row: Row) -> dict[str, Any]:
    p, c = row.prediction, row.prediction.candidate
    eq1 = closed_seconds(p)
    return {
        "schedule": c.schedule,
        "kind": label(c),
        "stages": c.stages,
        "replicas": c.replicas,
        "microbatch": c.microbatch,
        "microbatches": c.microbatches,
        "chunks": c.chunks,
        "unit": c.unit,
        "tensor": c.tensor,
        "sub_pipelined": c.sub_pipelined,
        "experts": c.experts,
        "context": c.context,
        "sequence_parallel": c.sequence_parallel,
        **{key: value for key, value in c.options.items() if key != "memory_limit"},  # that is in the plan
        "placement": c.placement,
        "sync": c.sync,
        "innermost": c.innermost,
        "shard": c.shard,
        "gather": c.gather if c.level == 3 else None,
        "shard_replicas": c.shard_group if c.level else None,
        # What one device's link spends on them in a step, of the device that spends most.
        **{f"{key}_s": seconds for key, seconds in link_seconds(p).items()},
        "recompute": recompute_word(p),
        "keep": list(p.keep) if p.keep is not None else None,
        "recomputed_layers": sorted(p.recomputed) if p.recomputed is not None else None,
        # Without the last digits, in which equal plans differ by the order of their sums.
        "predicted_step_s": float(f"{p.step_s:.12g}"),
        "chimera_step_s": eq1,
        "throughput": p.throughput,
        "bubble_ratio": p.bubble_ratio,
        # One entry per device: the ranks of a tensor-parallel group are adjacent and hold equally much.
        "memory_bytes": [size for size in p.memory_bytes for _ in range(c.tensor)] * c.replicas,
        "memory_terms": p.memory[p.fullest].terms(),
        "capacity_bytes": p.capacity,
        "fits": p.fits,
        "why": row.why,
        "group": row.group,
        # No plan of this division of the devices is shorter, whatever its cut, placement and order.
        "bound_s": None if row.certificate is None else row.certificate.bound_s,
        "gap": None if row.certificate is None else row.certificate.gap(p.step_s),
        "binds": None if row.certificate is None else row.certificate.binds,
    }


def recompute_word(p: Prediction) -> Recompute:
    """Return what a plan recomputes, in the words of a job's ``parallel.recompute``: ``none``, ``full`` (also where the
    schedule does so by itself), ``microbatches`` if some of them keep their activations, ``layers`` if some do."""
    if p.recomputed is not None:
        return "layers" if len(p.recomputed) < sum(map(len, p.cut)) else "full"
    if p.candidate.recompute == "none":
        named = p.order is None or p.candidate.gather == "order"  # the schedule, not a search, recomputes
        return "full" if p.form.recomputes and named else "none"
    return "microbatches" if p.keep is not None and any(p.keep) else "full"


def link_seconds(p: Prediction) -> dict[str, float]:
    """Return the seconds of a step that the gathers and the reduce-scatters of shards keep one device's link busy, on
    the device where each is most."""
    if p.candidate.shard == "none":
        return {"gather": 0.0, "reduce_scatter": 0.0}
    order = sharded(schedule_of(p), p.candidate)

    def busy(kind: str, seconds: Sequence[float]) -> float:
        return max(sum(seconds[t.stage] for t in own if t.kind == kind) for own in order.orders)

    return {"gather": busy("AG", p.costs.gather), "reduce_scatter": busy("RS", p.costs.reduce_scatter)}


def schedule_of(p: Prediction) -> Schedule:
    """Return the schedule of one data-parallel copy, without all-reduces and updates."""
    if p.order is not None:
        return p.order
    c = p.candidate
    whole, close = replace(c, shard="none"), c.shard == "none"
    return Orders().of(whole, c.microbatches, p.keep, p.remade, p.frozen, close).schedule


def closed_seconds(p: Prediction) -> float | None:
    """Return the step time by Chimera's Eq. 1; None for split backwards, frozen stages, asynchronous or very large
    schedules."""
    if not _known(p):
        return None
    return closed_form(schedule_of(p), p.costs, p.candidate.replicas).step_s


def terms_beside(p: Prediction) -> list[Difference]:
    """Compare Eq. 1 with the simulator term by term; empty where Eq. 1 does not apply."""
    if not _known(p):
        return []
    return differences(schedule_of(p), p.costs, p.candidate.replicas, p.candidate.sync)


def _known(p: Prediction) -> bool:
    if not p.form.joint or p.form.versions != "flush" or p.candidate.shard != "none" or p.frozen:
        return False
    return 3 * p.form.stages * p.candidate.microbatches <= MOST_TASKS
