"""Explain a layout: where its step goes beside the chosen plan's, and what each of the plan's decisions saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from raypipe.errors import RaypipeError
from raypipe.plan.emit.layout import TrainerLayout
from raypipe.plan.emit.trainers import GIB, Costs, layout_of
from raypipe.plan.plan import Plan
from raypipe.plan.predict.of_plan import PlanPrediction
from raypipe.plan.predict.orders import Order

CHANGES = {
    "cut": (),
    "order of tasks": ("schedule", "chunks", "placement", "unit", "pipelines", "concat", "slices", "memory_limit"),
    "what copies divide": ("shard", "gather", "shard_replicas"),
    "when gradients are summed": ("sync",),
    "recomputation": ("recompute", "keep", "alphas"),
    "numbering of devices": ("innermost",),
}
"""Decisions of a plan, with their ``parallel`` keys, each of which may be taken alone."""
WORTH = 1e-3
"""Share of a step below which a change is not named."""


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A layout beside the chosen plan. Times in seconds, memory in bytes."""

    step_s: float
    planned_s: float
    excess: float
    """What the fullest device lacks; negative: spare."""
    parts: dict[str, tuple[float, float]]
    """Parts of the step, of the layout and of the plan; their sums are the steps."""
    saved: dict[str, float]
    """The plan's decisions that would shorten the layout's step if they were taken alone, by what they save."""

    def lines(self, what: str) -> Iterator[str]:
        """Say it in words; ``what``: the layout."""
        longer = self.step_s / self.planned_s - 1
        beside = (
            f"{longer:.1%} longer than"
            if longer > WORTH
            else f"{-longer:.1%} shorter than"
            if longer < -WORTH
            else "as long as"
        )
        yield f"{what}: predicted {self.step_s:.4g} s a step, {beside} the plan that raypipe chooses"
        if self.excess > 0:
            yield f"  it does not fit: its fullest device lacks {self.excess / GIB:.1f} GiB"
        for name, (own, planned) in self.parts.items():
            yield f"  {name}: {own:.4g} s, {planned:.4g} s in the plan"
        for name, seconds in sorted(self.saved.items(), key=lambda pair: -pair[1]):
            yield f"  with the plan's {name} alone: {seconds:.4g} s less ({seconds / self.step_s:.1%})"
        if not self.saved and longer > WORTH:
            yield "  no decision of the plan alone shortens it: they differ in how devices are divided"


def slow(layout: TrainerLayout, plan: Plan, costs: Costs) -> Slow:
    """Return what is slow about a layout.

    Raises:
        ScheduleError: it has a schedule that does not exist for its shape.
        SpecError: the costs of its tensor-parallel groups are not known.
    """
    made = layout.plan()
    own, planned = costs.predict(made), costs.predict(plan)
    own_parts, plan_parts = _parts(own, made), _parts(planned, plan)
    saved = {name: own.time.step - step_s for name, step_s in _changed(layout, layout_of(plan, costs), costs)}
    return Slow(
        step_s=own.time.step,
        planned_s=planned.time.step,
        excess=own.excess,
        parts={name: (own_parts[name], plan_parts[name]) for name in own_parts},
        saved={name: seconds for name, seconds in saved.items() if seconds > WORTH * own.time.step},
    )


def _parts(p: PlanPrediction, plan: Plan) -> dict[str, float]:
    """Where a step goes: what the mean device computes, what the busiest does beyond it, bubbles, and the rest."""
    schedule = plan.one_copy().without({"AR", "U", "AG", "RS", "FREE"})
    tasks = [list(order) for order in schedule.orders]
    bare = replace(schedule, sharding=None)
    busy = [
        Order(replace(bare, orders=tuple(order if d == at else () for at, order in enumerate(bare.orders)))).work(
            p.costs
        )
        for d in range(len(tasks))
    ]
    slowest = max(busy) - sum(busy) / len(busy)
    bubbles = max(0.0, p.time.compute - p.time.busy - slowest)
    rest = p.time.step - p.time.busy - slowest - bubbles
    return {
        "computing": p.time.busy,
        "the busiest device computes more": slowest,
        "bubbles and messages": bubbles,
        "gathers, sums and updates": rest,
    }


def _changed(layout: TrainerLayout, planned: TrainerLayout, costs: Costs) -> Iterator[tuple[str, float]]:
    """The layout with one decision of the plan at a time: its name, and the step where it fits."""
    for name, keys in CHANGES.items():
        tried = layout.with_keys(**{key: getattr(planned.parallel, key) for key in keys})
        alike = planned.parallel.stages == layout.parallel.stages
        if name == "cut":
            if not alike or len(planned.cut) != len(layout.cut):
                continue
            tried = replace(tried, cut=planned.cut)
        elif name == "order of tasks":
            if not alike:
                continue
            cut = layout.cut if len(planned.cut) == len(layout.cut) else planned.cut
            tried = replace(tried, order=planned.order, cut=cut)
        if (tried.parallel, tried.cut) == (layout.parallel, layout.cut):
            continue
        try:
            found = costs.predict(tried.plan())
        except RaypipeError:  # it takes further decisions
            continue
        if found.excess <= 0:
            yield name, found.time.step
