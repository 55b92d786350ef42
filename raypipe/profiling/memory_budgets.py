"""Choose how much of their activations compiled stages keep, where memory is what makes a plan slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raypipe.cost.profile import Profile
from raypipe.errors import SpecError
from raypipe.job.parallel_spec import BUDGET
from raypipe.job.spec import JobSpec
from raypipe.plan.best_first import NEAR
from raypipe.plan.choose import Decision

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
            found = choose(own, measure(own))
        except SpecError as error:
            if error.where != "memory":
                raise
            refusal = error
            continue
        least = found if least is None or found.best.step_s < least.best.step_s else least
    if least is None:
        assert refusal is not None
        raise refusal
    return least


def with_budget(job: JobSpec, budget: float) -> JobSpec:
    """Return the job with a budget for the activations of compiled stages."""
    changed: Mapping[str, Any] = {"parallel": job.parallel.model_copy(update={BUDGET: budget})}
    return job.model_copy(update=changed)


def as_profiled(job: JobSpec, profile: Profile) -> JobSpec:
    """Return the job with the budget that a profile was measured under, if the job leaves it open."""
    taken = profile.taken_for
    if taken is None or job.train.compile != "inductor" or BUDGET in job.parallel.given:
        return job
    return with_budget(job, taken.activation_memory_budget)
