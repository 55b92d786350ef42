"""The plans that may be chosen: the job's wishes as candidates, the divisions of the devices, the judge of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from raypipe.cost.profile import Profile
from raypipe.cost.sizes import divided_sequences
from raypipe.cost.stages import as_job_runs
from raypipe.errors import SpecError
from raypipe.job.model_spec import GptSpec
from raypipe.job.parallel_spec import BUDGET, INNERMOST, SAME_AS, SHARDING, check_chunks
from raypipe.job.rules.no_effect import BrokenRule
from raypipe.job.rules.schedule import stash
from raypipe.job.spec import JobSpec
from raypipe.plan.candidate import SYNCS, Candidate, grids, slice_counts, ways_to_recompute
from raypipe.plan.predict.orders import Orders
from raypipe.plan.predict.predictor import Predictor, without_noise
from raypipe.plan.shard_ways import check_statistics
from raypipe.plan.tensor_groups import ALONE, Judges, Sharing, measured_with_experts, of_experts
from raypipe.schedule.shape import GRID, OPTIONS, Grid


@dataclass(slots=True)
class PlanChoice:
    """All that a plan is chosen from."""

    job: JobSpec
    profiles: Mapping[Sharing, Profile]
    """By what devices share."""
    judge: Judges
    grids: list[Grid]
    """Every division of the devices that the job allows."""
    count: int
    """Devices that there are."""
    asynchronous: bool
    """Whether schedules that train on stale weights may be chosen."""
    greedy: bool
    """Whether Chimera's rule chooses."""
    orders: Orders
    """Orders that were made."""

    @property
    def given(self) -> dict[str, Any]:
        """Keys of ``parallel`` that a plan must have."""
        return _given(self.job)

    def on(self, count: int) -> PlanChoice:
        """Return the same choice on another number of devices."""
        return replace(self, count=count, grids=_grids(self.job, self.profiles, count))

    def of(self, job: JobSpec, profiles: Mapping[Sharing, Profile]) -> PlanChoice:
        """Return the same choice for another job, with its costs."""
        shared = {sharing: own for sharing, own in profiles.items() if sharing != ALONE}
        return choice_of(
            job, profiles[ALONE], self.count, shared=shared, asynchronous=self.asynchronous, greedy=self.greedy
        )

    def wished(self, c: Candidate) -> Candidate | None:
        """The candidate, if it is one that the job asks for; with the recomputation that it asks for."""
        given = self.given
        for key in ("schedule", *OPTIONS):
            wish = SAME_AS.get(str(given.get(key)), given.get(key))
            if key in given and wish not in (getattr(c, key), "auto"):
                return None
        if given.get("schedule") == "auto" and c.stages == 1:
            return None
        if any(
            key in given and given[key] != getattr(c, key) for key in SHARDING if c.shard != "none" or key == "shard"
        ):
            return None
        if given.get("recompute") == "none" and c.form.recomputes and "schedule" not in given:
            return None
        recompute = "full" if given.get("recompute") == "full" else c.recompute
        return replace(c, recompute=recompute, innermost=given.get(INNERMOST, c.innermost))

    def pick(self, c: Candidate) -> Candidate | None:
        """The candidate, if it may be chosen."""
        return None if self.refusal(c) else self.wished(c)

    def refusal(self, c: Candidate) -> BrokenRule | None:
        """Why a candidate may not be chosen."""
        named = self.job.parallel.auto and self.job.parallel.given.get("schedule") == c.schedule
        if c.form.versions != "flush" and not (self.asynchronous or named):
            why = "trains on stale weights; allow it with --allow asynchronous"
            return "parallel.schedule", why, "allow it, or leave the schedule out"
        if c.form.versions == "stash":
            return next(stash(self.job.model, self.job.train, c.parallel()), None)
        return None


def choice_of(
    job: JobSpec,
    profile: Profile,
    count: int,
    *,
    shared: Mapping[Sharing, Profile] = MappingProxyType({}),
    asynchronous: bool = False,
    greedy: bool = False,
    earlier: PlanChoice | None = None,
) -> PlanChoice:
    """Return what a job's plan is chosen from on so many devices; arguments as those of ``choose``.

    ``earlier``: of the same job, with fewer profiles; what was found there of those is known here.

    Raises:
        SpecError: the job asks for what no plan has.
    """
    parallel, train, given = job.parallel, job.train, _given(job)
    check_statistics(parallel.shard, profile.batch_statistics)
    if given.get("slices", 1) > 1 and profile.slicing is not None and profile.slicing.refused_slices:
        raise SpecError("parallel.slices", profile.slicing.refused_slices, "use slices: 1")
    if profile.other_kinds and count > profile.devices:
        raise SpecError(
            "devices",
            f"{count} devices of a cluster that has {profile.devices}, of several kinds",
            f"use at most {profile.devices}",
        )
    named = SAME_AS.get(str(given.get("schedule")), given.get("schedule"))
    asked = {key: given[key] for key in (*OPTIONS, *SHARDING, INNERMOST) if key in given}
    if named not in (None, "auto"):
        asked["schedule"] = named
    syncs = tuple(s for s in SYNCS if given.get("sync", s) == s)
    known = {ALONE: profile, **(shared if not greedy or "tensor" in given else {})}
    if (copies := given.get("context", 1)) > 1:
        _check_context(profile, copies, given)
        known[Sharing(context=copies)] = divided_sequences(profile, copies)
    if not greedy:
        known |= measured_with_experts(job, profile, count)
    profiles = of_experts({Sharing(*key): own for key, own in known.items()}, given.get("experts"))
    divides = not profile.batch_statistics and not parallel.replan and train.cuda_graphs != "tasks"
    divides = divides and (not greedy or "shard" in given)
    if earlier is not None and earlier.greedy != greedy:  # its judges recompute and divide other things
        earlier = None
    orders_made = Orders() if earlier is None else earlier.orders
    before = {} if earlier is None else of_experts(earlier.profiles, given.get("experts"))
    judge = Judges(
        {
            sharing: earlier.judge.by[sharing]
            if earlier is not None and before.get(sharing) is own
            else Predictor(
                as_job_runs(without_noise(own), train, parallel),
                train,
                deepest(job, own),
                syncs=syncs,
                recompute=ways_to_recompute(given.get("recompute"), greedy),
                asked=asked,
                slices=slice_counts(job, own) if sharing == ALONE and "slices" not in asked else (),
                divides=divides,
                _orders=orders_made,
            )
            for sharing, own in profiles.items()
        }
    )
    every = _grids(job, profiles, count)
    if not every:
        fix = "give fewer keys, or others"
        if given.get("tensor", 1) not in {sharing.tensor for sharing in profiles}:
            fix = "costs of divided layers are computed, not measured: "
            fix += "--cluster, with a tensor that divides model and host"
        words = ", ".join(f"{key}: {value}" for key, value in given.items()) or "any shape"
        raise SpecError("parallel", f"no plan on {count} devices has {words} at train.batch = {train.batch}", fix)
    return PlanChoice(
        job,
        {Sharing(*key): own for key, own in known.items()},
        judge,
        every,
        count,
        asynchronous,
        greedy,
        orders_made,
    )


def _check_context(profile: Profile, copies: int, given: Mapping[str, Any]) -> None:
    """Check that plans whose copies divide sequences can be costed.

    Raises:
        SpecError: they cannot.
    """
    for key in ("tensor", "experts"):
        if given.get(key, 1) > 1:
            why = f"plans of context: {copies} and {key}: {given[key]} are not costed"
            raise SpecError("parallel.context", why, f"leave one of them out, or give the whole plan, for {key} too")
    if profile.slicing is None:
        raise SpecError("parallel.context", "the profile does not say how sequences may be cut", "measure it again")
    if profile.slicing.refused:
        fix = "use context: 1, give the whole plan, or, where the profile is of a job without context, measure it again"
        raise SpecError("parallel.context", profile.slicing.refused, fix)
    check_chunks(profile.slicing.positions, copies)


def deepest(job: JobSpec, profile: Profile) -> int:
    """Stages that the model can be cut into."""
    return job.model.layers if isinstance(job.model, GptSpec) else len(profile.layers)


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


def _given(job: JobSpec) -> dict[str, Any]:
    return job.parallel.given if job.parallel.auto else {}


def _grids(job: JobSpec, profiles: Mapping[Sharing, Profile], count: int) -> list[Grid]:
    """Return every division of the devices that the job allows."""
    given = _given(job)
    return [
        g
        for sharing, own in of_experts(profiles, given.get("experts")).items()
        for g in grids(count, job.train.batch, deepest(job, own), 1, _largest(own), *sharing)
        if all(given.get(key, getattr(g, key)) == getattr(g, key) for key in GRID if key != "microbatches")
    ]


def _largest(profile: Profile) -> int:
    """Return the largest micro-batch that it has times of."""
    return max(size for layer in profile.layers for size in layer.times)
