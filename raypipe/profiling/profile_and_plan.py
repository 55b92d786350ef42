"""Plan a job with ``parallel: auto``: measure it on the devices that will train it, then choose a plan."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import ray

from raypipe.cost.profile import Profile
from raypipe.errors import SpecError
from raypipe.files import write_whole
from raypipe.job.parallel_spec import BUDGET
from raypipe.job.spec import JobSpec
from raypipe.observe.run_dir import PROFILE
from raypipe.plan.best_first import NEAR
from raypipe.plan.choice import with_budget
from raypipe.plan.choose import Decision, choose, label
from raypipe.plan.watch import BUDGET_S, Watch
from raypipe.profiling.profile_job import measure_profile
from raypipe.runtime.cluster.connect import connect_all
from raypipe.search.budget import Budget

SIZES = (1, 2, 4, 8, 16)
"""Micro-batch sizes that are measured, if they divide the mini-batch."""
CORES = 8
"""Largest number of cores of one host that are measured, because every one takes a process of its own."""
SEARCH_S = 1.0
"""Seconds for searching orders. It is short because the run searches again on the times that it measures."""


def profile_this_machine(
    job: JobSpec,
    devices: int | None,
    data: Path | None,
    dashboard_port: int | None,
    say: Callable[[str], None],
    leave: bool = False,
) -> Profile:
    """Measure a short profile on the Ray cluster, or on this machine if there is none.

    Args:
        job: the job.
        devices: the number of devices to plan for; None for all.
        data: the folder of the prepared data; None prepares it in a temporary folder.
        dashboard_port: port for the dashboard of a Ray started here; None for no dashboard.
        say: called with sentences about the progress.
        leave: leave the workers on their devices, for the job's run.

    Raises:
        SpecError: the cluster that RAY_ADDRESS names does not answer or has too few devices, or the job asks for
            tensor parallelism, which is not measured.
        RunError: a device died.
    """
    given = job.parallel.given if job.parallel.auto else {}
    if given.get("tensor", 1) > 1:
        raise SpecError(
            "parallel.tensor",
            "tensor-parallel layers cannot be measured, only computed for a described cluster",
            "plan with raypipe autoconfigure --cluster FILE, or give schedule, stages and microbatch",
        )
    count = connect_all(dashboard_port, given.get("stages", 1) * given.get("replicas", 1))
    microbatch = given.get("microbatch")
    sizes = [microbatch] if microbatch is not None else [size for size in SIZES if job.train.batch % size == 0]
    wanted = devices or count
    measured = min(wanted, _most_measured())
    began = time.monotonic()
    profile = measure_profile(job, sizes, measured, quick=True, cached=True, data=data, say=say, leave=leave)
    say(f"measured in {time.monotonic() - began:.1f} s")
    # Where only some of the host's cores were measured, each of them counted too large a share of its memory.
    used = min(wanted, count)
    hosts = (used,) if measured < used else profile.hosts
    share = min(1.0, measured / used)
    return profile.model_copy(update={"devices": wanted, "memory_bytes": profile.memory_bytes * share, "hosts": hosts})


def _most_measured() -> int:
    """Return how many devices measure at most: on one host of CPUs, a few cores represent all of them."""
    one_host = sum(bool(node["Alive"]) for node in ray.nodes()) == 1
    return CORES if one_host and not ray.cluster_resources().get("GPU") else sys.maxsize


def profile_and_plan(
    job: JobSpec, directory: Path, data: Path, dashboard_port: int | None, say: Callable[[str], None]
) -> Decision:
    """Measure a job and choose its plan; the profile is saved in the run's directory.

    Raises:
        SpecError: no plan fits, or the job cannot be measured.
        RunError: a device died while measuring.
    """
    measured: dict[float, Profile] = {}

    def measure(one: JobSpec) -> Profile:
        # An elastic run reserves devices by node, of those that are free by then.
        profile = profile_this_machine(one, None, data, dashboard_port, say, leave=one.train.elastic is None)
        if (warning := profile.noise.warning()) is not None:
            say(warning)
        measured[one.parallel.activation_memory_budget] = profile
        return profile

    def plan(one: JobSpec, profile: Profile) -> Decision:
        elastic = one.train.elastic
        devices = None if elastic is None else elastic.within(profile.devices)
        return choose(one, profile, devices, search_s=SEARCH_S, watch=Watch(Budget(BUDGET_S)))

    decision = choose_budget(job, measure, plan, say)
    profile = measured[decision.plan.parallel.activation_memory_budget]
    write_whole(directory / PROFILE, profile.model_dump_json(indent=1) + "\n")
    for line in decision_lines(decision):
        say(line)
    return decision


def decision_lines(decision: Decision) -> list[str]:
    """Describe the chosen plan, the reason, and the second best plan."""
    best, *others = decision.rows
    c, budget = best.prediction.candidate, decision.plan.parallel.activation_memory_budget
    keeps = f", stages keep {budget:g} of their activations" if budget < 1 else ""
    lines = [
        f"planned: {c.schedule}, {c.stages} stages x {c.replicas} replicas, micro-batches of {c.microbatch}{keeps}",
        f"{best.prediction.step_s:.4f} s a step expected; {best.why}",
    ]
    second = next((row for row in others if row.prediction.fits), None)
    if second is not None:
        s = second.prediction.candidate
        lines.append(f"next: {label(s)}, {s.stages} x {s.replicas}, micro-batches of {s.microbatch}: {second.why}")
    return lines


# Choose how much of their activations compiled stages keep, where memory is what makes a plan slow.

LESS = (0.5, 0.25)
"""Budgets that are measured where memory is short."""
ROOM = 1 << 60
"""Bytes of a device on which everything fits."""

Measure = Callable[[JobSpec], Profile]
Choose = Callable[[JobSpec, Profile], Decision]


def choose_budget(job: JobSpec, measure: Measure, choose: Choose, say: Callable[[str], None]) -> Decision:
    """Choose a plan, and with compiled stages how much of their activations they keep.

    Less than all is measured only if the best plan would be faster on devices of unlimited memory, for example one that
    recomputes nothing: each budget compiles and measures the layers again.

    Args:
        job: to plan. With ``compile: inductor`` and without ``parallel.activation_memory_budget`` it is chosen.
        measure: measures the layers of a job under its budget.
        choose: chooses a plan on a profile.
        say: called with sentences about what is found.

    Raises:
        SpecError: no plan fits, under any budget.
    """
    profile = measure(job)
    if job.train.compile != "inductor" or BUDGET in job.parallel.given:
        return choose(job, profile)
    least: Decision | None = None
    refusal: SpecError | None = None
    try:
        least = choose(job, profile)
    except SpecError as error:
        if error.where != "memory":
            raise
        refusal = error
    if least is not None:
        roomy = choose(job, profile.model_copy(update={"memory_bytes": ROOM}))
        if roomy.best.step_s >= least.best.step_s * (1 - NEAR):
            return least
    for budget in LESS:
        say(f"memory is short: measuring stages that keep {budget:g} of their activations")
        own = with_budget(job, budget)
        try:
            result = choose(own, measure(own))
        except SpecError as error:
            if error.where != "memory":
                raise
            refusal = error
            continue
        least = result if least is None or result.best.step_s < least.best.step_s else least
    if least is None:
        assert refusal is not None
        raise refusal
    return least
