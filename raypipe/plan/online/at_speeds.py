"""Plan for devices of which some have turned slow: another cut, order or schedule over the same devices."""

from __future__ import annotations

from collections.abc import Mapping

from raypipe.cost.profile import Profile
from raypipe.errors import SpecError
from raypipe.job.spec import JobSpec
from raypipe.plan.choose import choose, plan_of
from raypipe.plan.plan import Plan
from raypipe.plan.predict.of_plan import PlanPredictor
from raypipe.plan.watch import Watch

Slow = Mapping[int, float]
"""Number of a device (``cost.hosts.Numbering``) -> how many times as long as they should its tasks take."""


def at_speeds(profile: Profile, speeds: tuple[float, ...]) -> Profile:
    """Return a profile of devices alike, in which device k takes ``speeds[k]`` times as long.

    Each device is a host of its own there, as kinds are known by host. Hosts' links then join all devices: where the
    profile has one host, its inner link does.
    """
    factors = sorted(set(speeds))
    several = len(profile.placed.of_first(len(speeds))) > 1
    links = {} if several else {"between": profile.inside, "collective": None, "host_links": 1}
    alone = profile.model_copy(update={"devices_per_host": 1, "alone": 1.0, **links})

    def kind(factor: float) -> Profile:
        count = speeds.count(factor)
        return alone.at_speed(factor).model_copy(update={"devices": count, "hosts": (1,) * count})

    first, *others = map(kind, factors)
    return first.model_copy(
        update={
            "devices": len(speeds),
            "hosts": (1,) * len(speeds),
            "kind_of_host": tuple(map(factors.index, speeds)) if others else (),
            "other_kinds": tuple(others),
        }
    )


def step_at(job: JobSpec, profile: Profile, plan: Plan, slow: Slow) -> float:
    """Return the seconds of a plan's step on devices of which some are slow.

    Raises:
        ScheduleError: the plan's program cannot run.
    """
    numbering = plan.numbering()
    # A profile of several kinds numbers a position's devices in all copies one after another, whatever the plan does.
    numbers = [numbering.number(copy, at) for at in range(numbering.width) for copy in range(numbering.copies)]
    speeds = tuple(slow.get(number, 1.0) for number in numbers)
    return PlanPredictor(job, at_speeds(profile, speeds)).time(plan).step


def choose_at(job: JobSpec, profile: Profile, devices: int, slow: Slow, search_s: float, watch: Watch) -> Plan:
    """Return the fastest plan on all of the devices, of which some are slow.

    Raises:
        SpecError: no plan fits them.
    """
    speeds = tuple(slow.get(number, 1.0) for number in range(devices))
    decision = choose(job, at_speeds(profile, speeds), devices, search_s=search_s, watch=watch)
    on_all = [row.prediction for row in decision.rows if row.group == "ranked"]
    on_all = [p for p in on_all if p.fits and p.candidate.devices == devices]
    if not on_all:
        raise SpecError("plan", f"no plan uses all {devices} devices, of which some are slow", "leave it as it is")
    best = plan_of(min(on_all, key=lambda p: p.step_s), job)
    if best.parallel.replicas > 1 and best.parallel.stages > 1:  # as such a profile numbers devices
        best = best.remade(job.train.batch, innermost="replicas")
        best = best.model_copy(update={"predicted_step_s": min(p.step_s for p in on_all)})
    return best.planned_for(job, profile.device, profile.placed.of_first(devices))
