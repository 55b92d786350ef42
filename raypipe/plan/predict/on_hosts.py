"""Compare the hosts that a plan was made for with those on which its devices are, and predict the step there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raypipe.cost.hosts import Hosts, words
from raypipe.cost.profile import Profile
from raypipe.cost.profile_check import check_profile
from raypipe.errors import ClusterError, SpecError
from raypipe.job.spec import JobSpec
from raypipe.plan.plan import Plan
from raypipe.plan.predict.of_plan import PlanPredictor


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
    except SpecError:
        return False
    return len(profile.layers) == sum(map(len, plan.cut))
