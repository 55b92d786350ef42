"""Other cuts of a model with frozen layers, costed by its profile.

Measured stages do not say what their layers would take in other stages: a frozen stage before the first trained one has
no backward to measure, and a trained one no more than the sum over its layers. So the profile's times of every layer
are scaled until the present stages take what was measured, and cuts are costed as the planner costs them; each has the
schedule that is left by its own frozen stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raypipe.cost.profile import LayerProfile, Profile
from raypipe.cost.sizes import times_at
from raypipe.cost.stages import frozen_stages, stage_costs
from raypipe.errors import ScheduleError
from raypipe.explain.recut import BY_LAYERS, Cut
from raypipe.plan.plan import Plan, build_schedule
from raypipe.schedule import SCHEDULES
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule


def profiled_costs(profile: Profile, plan: Plan, schedule: Schedule, cut: Cut | None = None) -> CostTable:
    """Return what a profile says of the stages of a plan, or of another cut of it.

    Args:
        profile: of the plan's model.
        plan: what runs.
        schedule: its step over all devices.
        cut: the plan's own, if None.
    """
    per_copy = schedule.replicas // plan.parallel.replicas
    split = any(task.kind == "W" for task in schedule.tasks())
    return stage_costs(
        profile,
        plan.cut if cut is None else cut,
        plan.parallel.microbatch,
        schedule.placement[:per_copy],
        copies=plan.parallel.replicas,
        innermost=plan.parallel.innermost,
        size=float(schedule.size),
        slices=schedule.rules.slices,
        split=split,
    )


@dataclass(slots=True)
class RecutFrozen:
    """The cuts of a running plan, with what their steps would cost."""

    profile: Profile
    plan: Plan
    schedule: Schedule
    """The step that runs, over all devices."""
    costs: CostTable
    """Measured."""
    speed: list[float]
    """Per stage, how many times as long as an undisturbed device the one that holds it takes."""
    batch: int
    """``train.batch``."""
    _schedules: dict[tuple[int, ...], Schedule | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plain = self.profile.model_copy(update={"task_overhead_s": 0.0})  # it is among what was measured
        predicted = profiled_costs(plain, self.plan, self.schedule)
        layers = list(plain.layers)
        for s, own in enumerate(self.plan.cut):
            factors = self._factors(predicted, s)
            for i in own:
                layers[i] = _scaled(layers[i], factors)
        self.profile = plain.model_copy(update={"layers": tuple(layers)})
        self._schedules[self.schedule.rules.frozen] = self.schedule

    def _factors(self, predicted: CostTable, s: int) -> dict[str, float]:
        """By kind of time, what was measured of a stage over what the profile says; the forward's if there is none."""

        def factor(measured: float, said: float, default: float) -> float:
            return measured / said / self.speed[s] if measured > 0 and said > 0 else default

        costs = self.costs
        forward = factor(costs.forward[s], predicted.forward[s], 1.0)
        found = {"forward": forward, "recompute": factor(costs.recompute[s], predicted.recompute[s], forward)}
        if any(task.kind == "W" for task in self.schedule.tasks()):
            for name in ("input_grad", "weight_grad"):
                found[name] = factor(getattr(costs, name)[s], getattr(predicted, name)[s], forward)
            return found | {"joint": found["input_grad"]}
        both = (costs.input_grad[s] + costs.weight_grad[s], predicted.input_grad[s] + predicted.weight_grad[s])
        return found | dict.fromkeys(("input_grad", "weight_grad", "joint"), factor(*both, forward))

    @property
    def layer_s(self) -> list[float]:
        """Undisturbed seconds of each layer for one micro-batch, there and back."""
        times = [times_at(layer, self.plan.parallel.microbatch) for layer in self.profile.layers]
        first = next((i for i, layer in enumerate(self.profile.layers) if layer.trained), 0)
        return [t.forward + (t.joint if i >= first else 0.0) for i, t in enumerate(times)]

    def costs_of(self, cut: Cut) -> CostTable:
        """Return the costs of a cut; messages and sums of gradients as measured."""
        found = profiled_costs(self.profile, self.plan, self.schedule, cut)
        scaled = {n: tuple(t * v for t, v in zip(getattr(found, n), self.speed, strict=True)) for n in BY_LAYERS}
        return replace(self.costs, **scaled)

    def schedule_of(self, cut: Cut) -> Schedule | None:
        """Return the step that a cut's frozen stages leave; None for a fixed order of other tasks."""
        frozen = frozen_stages(self.profile, cut)
        if frozen not in self._schedules:
            self._schedules[frozen] = None
            if self.plan.parallel.schedule in SCHEDULES:
                try:
                    other = Plan.of(self.plan.parallel, cut, self.batch, frozen=frozen)
                    self._schedules[frozen] = build_schedule(other, self.batch)
                except ScheduleError:
                    pass
        return self._schedules[frozen]


def _scaled(layer: LayerProfile, factors: dict[str, float]) -> LayerProfile:
    times = {
        size: t.model_copy(update={name: factor * getattr(t, name) for name, factor in factors.items()})
        for size, t in layer.times.items()
    }
    return layer.model_copy(update={"times": times})
