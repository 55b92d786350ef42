"""The step and the memory of a plan that is given whole, as the planner predicts its own candidates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raypipe.cost.collectives import collective_seconds
from raypipe.cost.hosts import Layout
from raypipe.cost.kinds import capacities
from raypipe.cost.memory import DeviceMemory, device_memory
from raypipe.cost.profile import Profile
from raypipe.cost.sharded_stages import with_sharding
from raypipe.cost.stages import as_exchanged, costs_of
from raypipe.job.requested_schedule import layers_to_recompute
from raypipe.job.spec import JobSpec
from raypipe.plan.plan import Plan
from raypipe.plan.predict.orders import Order
from raypipe.plan.predict.predictor import without_noise
from raypipe.plan.predict.step_time import StepOverheads, StepTime, step_time
from raypipe.schedule.costs import CostTable
from raypipe.schedule.ir import Schedule
from raypipe.schedule.kinds import SHARDED
from raypipe.schedule.lowering.norm_policy import RequestedNormPolicy
from raypipe.schedule.passes.sync import placement_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrediction:
    """A plan, judged."""

    time: StepTime
    """Seconds of a step and of its parts."""
    memory: tuple[DeviceMemory, ...]
    """Per device of a copy, bytes at its fullest moment."""
    capacities: tuple[float, ...]
    """Bytes of each device."""
    costs: CostTable
    """Seconds of each task."""

    @property
    def excess(self) -> float:
        """Bytes that the fullest device lacks; negative: spare."""
        return max(device.total - size for device, size in zip(self.memory, self.capacities, strict=True))


class PlanPredictor:
    """Predicts the plans of a job on the devices of a profile, whose devices are tensor-parallel groups."""

    def __init__(self, job: JobSpec, profile: Profile) -> None:
        self.job, self.profile = job, without_noise(profile)

    def time(self, plan: Plan, parts: bool = False) -> StepTime:
        """Return the steady time of a step; ``parts``: and of its parts.

        Raises:
            ScheduleError: the plan's program cannot run.
        """
        order, costs = self._order(plan), self.costs(plan)
        return step_time(Order(order), costs, placement_of(plan.parallel.sync), self._overheads(plan), parts=parts)

    def predict(self, plan: Plan) -> PlanPrediction:
        """Return the step's time and the memory of each device.

        Raises:
            ScheduleError: the plan's program cannot run.
            SpecError: the plan is of another model.
        """
        parallel, train, order = plan.parallel, self.job.train, Order(self._order(plan))
        profile = as_exchanged(self.profile, train, parallel)
        memory = device_memory(
            profile,
            tuple(range(own[0], own[-1] + 1) for own in plan.cut),
            plan.one_copy(),  # sums under way take memory too
            parallel.microbatch,
            copies=parallel.replicas,
            optimizer=train.optimizer,
            momentum=train.momentum,
            ahead=train.needs_norm and not self._overheads(plan).waits(order),
            recomputed=layers_to_recompute(parallel, plan.cut),
        )
        return PlanPrediction(
            time=self.time(plan, parts=True),
            memory=memory,
            capacities=capacities(profile, parallel.stages, parallel.replicas),
            costs=self.costs(plan),
        )

    def costs(self, plan: Plan) -> CostTable:
        """Return the costs of the plan's tasks."""
        parallel, order = plan.parallel, self._order(plan)
        copy = replace(order.without(SHARDED), sharding=None)
        profile = as_exchanged(self.profile, self.job.train, parallel)
        costs = costs_of(
            profile,
            plan.cut,
            parallel.microbatch,
            copy,
            parallel.replicas,
            layers_to_recompute(parallel, plan.cut),
            parallel.innermost,
        )
        if order.sharding is None:
            return costs
        return with_sharding(
            costs, profile, plan.cut, copy.placement, order.sharding, parallel.replicas, parallel.innermost
        )

    def _order(self, plan: Plan) -> Schedule:
        return plan.one_copy().without({"AR", "U"})

    def _overheads(self, plan: Plan) -> StepOverheads:
        parallel, order = plan.parallel, self._order(plan)
        if not self.job.train.needs_norm:
            return StepOverheads(copies=parallel.replicas)
        everyone = Layout.of(range(order.devices * parallel.replicas), self.profile.placed)
        norm_s = collective_seconds(self.profile, "all_reduce", 8.0, everyone)
        norm: RequestedNormPolicy = parallel.update if order.sharding is None else "wait"  # all that shards know
        return StepOverheads(copies=parallel.replicas, norm=norm, norm_s=norm_s)
