"""Less than all activations are kept only where memory makes the plan slow."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from raypipe.cost.profile import Profile, TakenFor
from raypipe.errors import SpecError
from raypipe.job.parallel_spec import BUDGET
from raypipe.job.spec import JobSpec
from raypipe.plan.choice import as_profiled, with_budget
from raypipe.plan.choose import Decision, choose
from raypipe.profiling.profile_and_plan import choose_budget
from tests.plan.conftest import MIB, make_job, make_profile


def job_of(**parallel: Any) -> JobSpec:
    return make_job(parallel={"auto": True, **parallel}, compile="inductor")


def compiled_profile(job: JobSpec, memory: int, taken: list[float]) -> Profile:
    """Half of the activations are computed again for a tenth of a forward's time."""
    budget = job.parallel.activation_memory_budget
    taken.append(budget)
    layers = []
    for layer in make_profile(devices=2).layers:
        extra = {n: 0.2 * (1 - budget) * t.forward for n, t in layer.times.items()}
        times = {
            n: t.model_copy(update={"joint": t.joint + extra[n], "input_grad": t.input_grad + extra[n]})
            for n, t in layer.times.items()
        }
        layers.append(layer.model_copy(update={"times": times, "kept_bytes": budget * layer.kept_bytes}))
    update = {"layers": tuple(layers), "taken_for": TakenFor.job(job)}
    return make_profile(devices=2, memory_bytes=memory * MIB).model_copy(update=update)


def decided(job: JobSpec, memory: int) -> tuple[Decision, list[float], list[str]]:
    taken: list[float] = []
    said: list[str] = []
    plan = partial(choose, search_s=0.0)
    return choose_budget(job, lambda one: compiled_profile(one, memory, taken), plan, said.append), taken, said


def test_with_room_all_is_kept_and_nothing_else_measured() -> None:
    decision, taken, said = decided(job_of(), 8192)
    assert (decision.plan.parallel.activation_memory_budget, taken, said) == (1.0, [1.0], [])


def test_where_memory_is_short_the_fastest_budget_is_taken() -> None:
    memory = 400
    decision, taken, said = decided(job_of(), memory)
    assert taken == [1.0, 0.5, 0.25]
    assert len(said) == 2
    alone = {b: decided(job_of(**{BUDGET: b}), memory)[0].best.step_s for b in taken}
    best = decision.plan.parallel.activation_memory_budget
    assert best < 1
    assert decision.best.step_s == alone[best] == min(alone.values()) < alone[1.0]


def test_what_fits_only_with_less_is_found_and_what_never_fits_is_refused() -> None:
    memory = next(m for m in range(400, 100, -10) if _refused(job_of(**{BUDGET: 1.0, "recompute": "none"}), m))
    decision, *_ = decided(job_of(recompute="none"), memory)
    assert decision.plan.parallel.activation_memory_budget < 1
    with pytest.raises(SpecError, match="no plan fits"):
        decided(job_of(), 105)


def _refused(job: JobSpec, memory: int) -> bool:
    try:
        decided(job, memory)
    except SpecError:
        return True
    return False


def test_a_job_that_gives_it_or_stays_eager_is_measured_once() -> None:
    decision, taken, _ = decided(job_of(**{BUDGET: 0.5}), 400)
    assert (decision.plan.parallel.activation_memory_budget, taken) == (0.5, [0.5])
    _, taken, _ = decided(make_job(parallel={"auto": True}), 400)
    assert taken == [1.0]


def test_a_profile_decides_what_the_job_leaves_open() -> None:
    job = job_of()
    profile = compiled_profile(with_budget(job, 0.25), 8192, [])
    assert as_profiled(job, profile).parallel.activation_memory_budget == 0.25
    given = job_of(**{BUDGET: 0.5})
    assert as_profiled(given, profile) is given
