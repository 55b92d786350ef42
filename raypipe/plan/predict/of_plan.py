"""The step and the memory of a plan that is given whole, as the planner predicts its own candidates, on the hosts that
it was made for or on others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from raypipe.cost.divided_head import as_divided
from raypipe.cost.hosts import Hosts, words
from raypipe.cost.kinds import capacities
from raypipe.cost.profile import Profile
from raypipe.cost.profile_check import check_profile
from raypipe.cost.sharded_stages import with_sharding
from raypipe.cost.stages import as_job_runs, costs_of
from raypipe.errors import ClusterError, SpecError
from raypipe.job.requested_schedule import layers_to_recompute
from raypipe.job.spec import JobSpec
from raypipe.plan.plan import Plan
from raypipe.plan.predict.orders import Order
from raypipe.plan.predict.prediction import PlanPrediction
from raypipe.plan.predict.predictor import Predictor, without_noise
from raypipe.plan.predict.step_time import StepTime, step_time
from raypipe.schedule.costs import CostTable
from raypipe.schedule.kinds import SHARDED
from raypipe.schedule.passes.sync import placement_of


class PlanPredictor:
    """Predicts the plans of a job on the devices of a profile, whose devices are tensor-parallel groups."""

    def __init__(self, job: JobSpec, profile: Profile) -> None:
        self.job, self.profile = job, without_noise(profile)

    def time(self, plan: Plan, parts: bool = False) -> StepTime:
        """Return the steady time of a step; ``parts``: and of its parts.

        Raises:
            ScheduleError: the plan's program cannot run.
        """
        judge, order = self._judge(plan), _order(plan)
        overheads = judge.overheads(plan.parallel, order)
        return step_time(order, _costs(judge, plan, order), placement_of(plan.parallel.sync), overheads, parts=parts)

    def predict(self, plan: Plan) -> PlanPrediction:
        """Return the step's time and the memory of each device.

        Raises:
            ScheduleError: the plan's program cannot run.
            SpecError: the plan is of another model.
        """
        parallel, judge, order, time = plan.parallel, self._judge(plan), _order(plan), self.time(plan, parts=True)
        recomputed = layers_to_recompute(parallel, plan.cut)
        return PlanPrediction(
            costs=_costs(judge, plan, order),
            step_s=time.step,
            compute_s=time.compute,
            busy_s=time.busy,
            memory=judge.memories.of_order(parallel, order, plan.cut, recomputed, whole=plan.one_copy()),
            capacities=capacities(judge.profile, parallel.stages, parallel.replicas),
        )

    def _judge(self, plan: Plan) -> Predictor:
        profile = as_job_runs(as_divided(self.profile, plan.parallel), self.job.train, plan.parallel)
        return Predictor(profile, self.job.train, len(profile.layers))


def _order(plan: Plan) -> Order:
    return Order(plan.one_copy().without({"AR", "U"}))


def _costs(judge: Predictor, plan: Plan, order: Order) -> CostTable:
    """Return the costs of the plan's tasks."""
    profile, parallel, sharding = judge.profile, plan.parallel, order.schedule.sharding
    copy = replace(order.schedule.without(SHARDED), sharding=None)
    recomputed = layers_to_recompute(parallel, plan.cut)
    costs = costs_of(profile, plan.cut, parallel.microbatch, copy, parallel.replicas, recomputed, parallel.innermost)
    if sharding is None:
        return costs
    return with_sharding(costs, profile, plan.cut, copy.placement, sharding, parallel.replicas, parallel.innermost)


class OtherHosts(NamedTuple):
    """A plan whose devices are on other hosts than it was made for."""

    plan: Plan
    """The same decision, with the prediction for the hosts that came; without one where there is no profile."""
    message: str
    """The two sets of hosts and the two predictions, for people."""


def on_hosts(
    plan: Plan, job: JobSpec, came: tuple[int, ...], profile: Profile | None, kinds: tuple[str, ...] = ()
) -> OtherHosts | None:
    """Return what changes if the plan's ranks are on other hosts than it was made for; None if nothing does.

    Args:
        plan: the plan.
        job: the job that it runs.
        came: number of ranks on each host, in the order in which the planner numbers devices.
        profile: the profile that the plan was made with, if it is at hand.
        kinds: the kind of accelerator on each of these hosts, "" where Ray names none.

    Raises:
        ClusterError: the ranks of a tensor-parallel group are on several hosts.
    """
    check_tensor_groups(plan.parallel.tensor, came)
    if plan.made_for is None:
        return None
    made_for = plan.made_for
    several = len(set(kinds)) > 1
    as_planned = made_for.hosts in ((), came) and (made_for.kinds == kinds if made_for.kinds else not several)
    if as_planned or not made_for.hosts:
        return None
    planned, before_s = made_for.hosts, plan.predicted_step_s
    text = f"planned for {words(planned)}{_of(made_for.kinds)}, runs on {words(came)}{_of(kinds) if several else ''}"
    costed = [kind.kind_name for kind in profile.kinds] if profile is not None and profile.other_kinds else []
    known = all(kind in costed for kind in kinds) if costed else not several
    usable = (
        profile is not None
        and plan.parallel.tensor == plan.parallel.context == 1
        and known
        and _is_of(profile, job, plan)
    )
    if profile is None or before_s is None or not usable:
        none = plan.model_copy(update={"predicted_step_s": None, "made_for": None})
        return OtherHosts(none, f"{text}: its prediction does not apply, and there is no profile to make another")
    there, here = (
        PlanPredictor(job, profile.on_hosts(counts, tuple(map(costed.index, of)) if costed else ())).time(plan).step
        for counts, of in ((planned, made_for.kinds), (came, kinds))
    )
    after_s = before_s * here / there
    moved = made_for.model_copy(update={"hosts": came, "kinds": kinds if made_for.kinds else ()})
    changed = plan.model_copy(update={"predicted_step_s": after_s, "made_for": moved})
    return OtherHosts(changed, f"{text}: predicted step {before_s:.4g} s there, {after_s:.4g} s here")


def _of(kinds: Sequence[str]) -> str:
    """Describe the kinds of accelerator of hosts."""
    return f" ({', '.join(kind or 'no accelerator type' for kind in kinds)})" if kinds else ""


def check_tensor_groups(size: int, came: Sequence[int]) -> None:
    """Check that every tensor-parallel group of ``size`` consecutive ranks is on one host.

    Raises:
        ClusterError: one is not; it names the group.
    """
    hosts = Hosts(1, tuple(came))
    for first in range(0, sum(came), size):
        if hosts.of(first) != hosts.of(first + size - 1):
            raise ClusterError(
                "parallel.tensor",
                f"the tensor-parallel group of ranks {first} to {first + size - 1} is on several hosts "
                f"({words(came)}), and its ranks exchange tensors in every layer",
                f"use hosts whose number of devices is a multiple of {size}, or a smaller parallel.tensor",
            )


def _is_of(profile: Profile, job: JobSpec, plan: Plan) -> bool:
    """Return whether the profile has the costs of this job's layers, as the plan cuts them."""
    try:
        check_profile(job, profile)
        layers = as_divided(profile, plan.parallel).layers
    except SpecError:
        return False
    return len(layers) == sum(map(len, plan.cut))
