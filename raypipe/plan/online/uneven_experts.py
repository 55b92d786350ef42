"""See while a run goes on whether experts in another order would give the copies that divide them more even loads.

Every layer's all-to-all waits for the copy whose experts got the most tokens. What routers choose changes as they
learn, so an order that was even at the start need not stay so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from raypipe.cost.experts import with_divided_experts
from raypipe.cost.profile import Profile, busiest, even_order
from raypipe.job.spec import JobSpec
from raypipe.plan.online.controller import Event
from raypipe.plan.plan import Plan
from raypipe.plan.predict.of_plan import PlanPredictor

WINDOW = 50
"""Steps whose loads are added up: those of one depend on its samples."""
GAIN = 0.05
"""Part of the busiest copy's tokens, over the layers, that another order has to take from it to be told of."""
Orders = tuple[tuple[int, ...], ...]


class UnevenExperts:
    """Follows the loads of a run's experts.

    Args:
        group: copies that divide the experts of each layer.
        orders: of each layer, the order in which they hold them; empty: ascending.
    """

    def __init__(self, group: int, orders: Orders) -> None:
        self._group, self._orders = group, orders
        self._loads: dict[str, NDArray[np.int64]] = {}
        self._steps = 0
        self._told = 1.0

    def observe(self, loads: Mapping[str, NDArray[np.int64]]) -> list[Event]:
        """Take a step's tokens of each expert, by layer in the model's order; after many steps, say what would be
        gained by another order, where that is more than was said before."""
        for path, counts in loads.items():
            self._loads[path] = self._loads.get(path, 0) + counts
        self._steps += 1
        if self._steps < WINDOW:
            return []
        each, self._loads, self._steps = [counts.tolist() for counts in self._loads.values()], {}, 0
        orders = self._orders or ((),) * len(each)
        now = sum(busiest(own, order, self._group) for own, order in zip(each, orders, strict=True))
        best = sum(min(busiest(own, even, self._group) for even in (even_order(own, self._group), ())) for own in each)
        if not now or best / now > min(self._told, 1.0) - GAIN:
            return []
        self._told = best / now
        said = f"the busiest of {self._group} copies gets {now / len(each):.2f} times the mean of the experts' tokens, "
        said += f"and would get {best / len(each):.2f} with experts in another order"
        fields = {"now": now / len(each), "best": best / len(each), "loads": each, "message": said}
        return [Event("uneven_experts", fields)]


def evened(job: JobSpec, profile: Profile, plan: Plan, loads: Sequence[Sequence[int]]) -> tuple[float, Plan] | None:
    """Return the seconds of a plan's step with such loads, and the same plan with experts in the most even order.

    Nothing where the profile does not say what of its layers belongs to experts, or of other layers.
    """
    group, before = plan.parallel.experts, plan.parallel.expert_order
    having = [n for n, layer in enumerate(profile.layers) if layer.experts is not None]
    if len(having) != len(loads) or profile.other_kinds:
        return None
    of = dict(zip(having, ([n * len(own) / max(1, sum(own)) for n in own] for own in loads), strict=True))
    layers = list(profile.layers)
    for n, own in of.items():
        experts = layers[n].experts
        assert experts is not None
        layers[n] = layers[n].model_copy(update={"experts": experts.model_copy(update={"loads": tuple(own)})})
    measured = profile.model_copy(update={"layers": tuple(layers)})
    orders = tuple(even_order(own, group) or tuple(range(len(own))) for own in of.values())
    was_s, new_s = (
        PlanPredictor(job, with_divided_experts(measured, group, orders=one)).time(plan).step
        for one in (before, orders)
    )
    result = plan.remade(job.train.batch, expert_order=orders).model_copy(update={"predicted_step_s": new_s})
    made = plan.made_for
    return was_s, result if made is None else result.planned_for(job, made.device, made.hosts, made.kinds)
