"""Choose a plan for a job: search, order the best placements anew, and say why everything else lost."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from types import MappingProxyType
from typing import Literal

from raypipe.cost.profile import Profile
from raypipe.cost.profile_check import check_profile
from raypipe.cost.stages import as_exchanged
from raypipe.errors import ScheduleError, SpecError
from raypipe.job.model_spec import GptSpec
from raypipe.job.parallel_spec import BUDGET, INNERMOST, JOBS_OWN, SAME_AS, SHARDING, ParallelSpec
from raypipe.job.rules.no_effect import BrokenRule
from raypipe.job.rules.schedule import stash
from raypipe.job.spec import JobSpec
from raypipe.plan.best_first import NEAR, Ranking, best_first, effort_s, faster_cut, rank_key, simplest
from raypipe.plan.candidate import SYNCS, Candidate, grids, slice_counts, slices_refused, ways_to_recompute
from raypipe.plan.certificate.of_plan import Certificate, Certifiers
from raypipe.plan.joint.better_plans import better_plans
from raypipe.plan.plan import Plan
from raypipe.plan.policy import largest_microbatch
from raypipe.plan.predict.orders import Orders
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.predict.predictor import Predictor, without_noise
from raypipe.plan.reasons import certified, why_refused, why_slower, why_too_large, why_won
from raypipe.plan.remedies import remedies, used_up
from raypipe.plan.searched import searched_gathers, searched_orders
from raypipe.plan.shard_ways import check_statistics
from raypipe.plan.tensor_groups import ALONE, Judges, Sharing, of_experts
from raypipe.plan.watch import ENDLESS, Watch
from raypipe.schedule import SCHEDULES
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.shape import GRID, OPTIONS, Grid

CONSIDERED = 10
"""The best plans of all, which shards, gathers, orders and cuts are tried with, however many rows are to be named."""
SEARCH_S = 3.0
"""Seconds for searching orders of the best placements."""
GRIDS = 3
"""Grids on which a family that is not among the best is tried for comparison."""
DIVIDED = 3
"""Plans that fit of which it is tried whether they are faster when their copies divide optimizer state or gradients."""
WORTH_DIVIDING = 0.02
"""Where memory does not ask for it, weights are divided for a step that is shorter by more than this share: they are
then sent in every step, and whatever slows a link down slows the step down."""
DIVIDED_WAYS = 250
"""Ways of dividing all weights over copies of the whole model that are tried."""
SMALLEST = 12
"""Of plans that do not fit, those that are predicted to name what the smallest lacks."""
TOO_LARGE = 3
"""Plans named that would be faster and do not fit."""
PROOF, MOST_PROOF_S = 1 / 3, 1.0
"""Share of the time to search that the chosen plan's certificate may take, and how much at most."""
LEAST_S = 0.5
"""Seconds for searching an order where the job asks for one and the time is up."""
POLICIES = ("best", "largest-microbatch")


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate of the ranking."""

    prediction: Prediction
    why: str
    group: Literal["ranked", "compared", "too large"] = "ranked"
    """``ranked``: the chosen one and the other best of all. ``compared``: the best of a family that is not among them,
    on the divisions of the devices that lead. ``too large``: faster, but for its memory."""
    certificate: Certificate | None = None
    """How short a step of this division of the devices could be; None where the plan does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The plan that was chosen, and what it was chosen from."""

    plan: Plan
    rows: tuple[Row, ...]
    """The chosen one, then the other best, then one of each family that is not among them, then those too large."""
    searched: int
    """Candidates and whole grids that were timed or ruled out."""
    timed: int
    """Candidates whose step was simulated."""
    left: int
    """Candidates and whole grids that were not tried, because the time was up."""
    seconds: float
    notes: tuple[str, ...] = ()
    """What was not searched, and how to read the rows."""

    @property
    def best(self) -> Prediction:
        """The chosen one."""
        return self.rows[0].prediction


@dataclass(slots=True)
class _Chooser:
    """One choice under way."""

    job: JobSpec
    judge: Judges
    grids: list[Grid]
    asynchronous: bool
    watch: Watch

    def wished(self, c: Candidate) -> Candidate | None:
        """The candidate, if it is one that the job asks for; with the recomputation that it asks for."""
        given = self.job.parallel.given if self.job.parallel.auto else {}
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

    def others(self, ranked: list[Prediction]) -> Iterator[Prediction]:
        """The best of each family that is not among ``ranked``, on the grids of those that are."""
        seen = {label(p.candidate) for p in ranked}
        for kind, of_kind in (
            ("single device", [g for g in self.grids if g.stages == g.replicas == g.tensor == 1]),
            ("data parallel", [g for g in self.grids if g.stages == g.tensor == 1 < g.replicas]),
            ("tensor parallel", self._shared(ranked)),
        ):
            if kind not in seen and not self.watch.over:
                yield from best_first(self.judge, of_kind, 1, self.wished, watch=self.watch).best
        deep = list(dict.fromkeys(p.candidate.grid for p in ranked if p.candidate.stages > 1))[:GRIDS]
        if not deep:
            deep = sorted((g for g in self.grids if g.stages > 1 == g.tensor), key=self.judge.least_on)[:GRIDS]
        families: dict[str, list[Candidate]] = {name: [] for name in SCHEDULES if name not in seen}
        for grid in deep:
            for made in self.judge.on(grid):
                c = self.wished(made)
                if c is not None and c.schedule in families:
                    families[c.schedule].append(c)
        for own in families.values():
            tried = []
            for c in sorted(own, key=lambda c: (self.judge.least(c), self.judge.least_of_all(c)))[:GRIDS]:
                if effort_s(c) > self.watch.share(1.0):
                    continue
                try:
                    tried.append(self.judge.predict(c, timed=True))
                    tried += [self.judge.predict(less) for _, less in self.judge.oom_fallback(tried[-1])]
                except ScheduleError:
                    continue
            if tried:
                best = min(tried, key=lambda p: (not p.fits, p.excess if not p.fits else 0.0, rank_key(p)))
                yield faster_cut(self.judge, best) if best.fits else best

    def divided(self, step_s: float) -> list[Prediction]:
        """Copies of the whole model that divide its weights too (ZeRO-3), where memory does not ask for that but their
        gathers hide more of the link's time than whole sums do: the fastest of those tried, if enough shorter than
        ``step_s``."""
        grids = sorted((g for g in self.grids if g.stages == g.tensor == 1 < g.replicas), key=self.judge.least_on)
        on_each = [self._divided_on(grid) for grid in grids]
        turns = (way for turn in zip_longest(*on_each) for way in turn if way is not None)
        step_s *= 1 - WORTH_DIVIDING
        best: Prediction | None = None
        for way in islice(turns, DIVIDED_WAYS):
            if self.watch.over:
                break
            if self.judge.least(way) >= step_s:
                continue
            for p in self._fitting(way, step_s):
                if p.step_s < step_s:
                    best, step_s = self.judge.time(p, final=True), p.step_s
        return [] if best is None else [best]

    def _fitting(self, c: Candidate, step_s: float) -> Iterator[Prediction]:
        """The candidate if it fits, else what may be faster than ``step_s`` of what it can recompute."""
        try:
            p = self.judge.predict(c)
        except ScheduleError:
            return
        if p.fits:
            yield p
        for least, less in [] if p.fits else self.judge.oom_fallback(p):
            if least < step_s and less.shard == c.shard:
                yield from self._fitting(less, step_s)

    def _divided_on(self, grid: Grid) -> list[Candidate]:
        """The ways to divide all weights on a grid, by the time that each takes at least."""
        made = [c for c in self.judge.on(grid) if c.shard == "none"]
        ways = {way for c in made for way in self.judge.shard_ways(c) if way.level == 3 and self.pick(way) == way}
        return sorted(ways, key=lambda way: (self.judge.least(way), way.simplicity))

    def _shared(self, ranked: list[Prediction]) -> list[Grid]:
        """Of the grids of groups that share layers, the most promising; none where the ranking has some already."""
        if any(p.candidate.tensor > 1 for p in ranked):
            return []
        return sorted((g for g in self.grids if g.tensor > 1), key=self.judge.least_on)[:GRIDS]

    def remedy(self, p: Prediction) -> str | None:
        """The least change with which a plan that is too large would fit."""
        c = p.candidate
        for grid in sorted(self.grids, key=lambda g: -g.microbatch):
            smaller = c.sized(grid.microbatch, grid.microbatches)
            if grid.microbatch < c.microbatch and grid == smaller.grid and self.judge.holds(smaller):
                return f"microbatch {grid.microbatch}"
        if c.recompute == "none" and not c.form.recomputes and self.judge.holds(replace(c, recompute="full")):
            return "recompute: full"
        if c.shard == "none":
            return next((f"shard: {way.shard}" for way in self.judge.shard_ways(c) if self.judge.holds(way)), None)
        return None

    def _ways(self, c: Candidate) -> list[Candidate]:
        """A candidate as it takes most memory, and least."""
        ways = [c, *(self.judge.shard_ways(c) if c.shard == "none" else ())]
        less = [replace(way, update="wait") for way in ways]
        return [c, *(replace(way, recompute="full") if self.judge.of(c).recompute else way for way in less)]

    def _predicted(self, ways: Iterable[Candidate]) -> Iterator[Prediction]:
        """The predictions of those that exist."""
        for way in ways:
            try:
                yield self.judge.predict(way)
            except ScheduleError:
                continue

    def nothing_fits(self, found: Ranking) -> SpecError:
        """Say what the smallest plan lacks."""
        deepest = max(g.stages for g in self.grids)
        ways = [c for c in found.unmade if c.shard != "none"] + [way for c in found.hopeless for way in self._ways(c)]
        smallest = {
            halves: min((g.microbatch for g in self.grids if g.sub_pipelined == halves), default=0)
            for halves in (False, True)
        }
        for grid in self.grids:
            if grid.stages in (1, deepest) and grid.microbatch == smallest[grid.sub_pipelined]:
                c = self.pick(Candidate.on(grid, "1f1b"))
                for made in [c] if c is not None else list(filter(None, map(self.pick, self.judge.on(grid)))):
                    ways += self._ways(made)
        ways = heapq.nsmallest(SMALLEST, dict.fromkeys(ways), key=self.judge.least_excess)
        nearest = sorted(found.too_large, key=lambda p: p.excess)[:SMALLEST]
        tried = [*nearest, *self._predicted(ways)]
        if not tried:
            wanted = (c for grid in self.grids for c in self.judge.on(grid) if self.wished(c))
            refused = next(filter(None, map(self.refusal, wanted)), None)
            if refused is not None:
                return SpecError(*refused)
            return SpecError(
                "parallel", "no schedule of this kind exists for the devices and the mini-batch", "give fewer keys"
            )
        least = min(tried, key=lambda p: p.excess)
        c = least.candidate
        shared = f" x {c.tensor}" if c.tensor > 1 else ""
        recomputed = ", recomputing," if c.recompute != "none" else ""
        return SpecError(
            "memory",
            f"no plan fits: even {c.schedule} on {c.stages} x {c.replicas}{shared} devices with micro-batches of "
            f"{c.microbatch}{recomputed} " + least.memory[least.fullest].sentence(least.capacity, used_up(least)),
            remedies(self.job, self.judge, tried, self.wished),
        )


def label(c: Candidate) -> str:
    """Return what a candidate is a case of."""
    if c.devices == 1:
        return "single device"
    if c.stages > 1:
        return c.schedule
    return "data parallel" if c.tensor == 1 else "tensor parallel"


def parallel_of(p: Prediction, job: JobSpec) -> dict[str, object]:
    """The ``parallel`` keys of a plan; what the job says of other things than the plan stays."""
    keep = {"keep": p.keep} if p.keep is not None and any(p.keep) else {}
    stay = [*JOBS_OWN, BUDGET, *(["tensor_table"] if p.candidate.tensor > 1 else [])]
    own = {key: value for key in stay if (value := job.parallel.given.get(key)) is not None}
    recomputed = {"recompute": tuple(sorted(p.recomputed))} if p.recomputed else {}
    return {**p.candidate.parallel(**keep, **own, **recomputed).model_dump(), "auto": False}


def plan_of(p: Prediction, job: JobSpec, certificate: Certificate | None = None) -> Plan:
    """The plan file of a prediction."""
    order = None if p.order is None else replace(p.order, name=p.candidate.schedule)
    parallel = ParallelSpec.model_validate(parallel_of(p, job))
    plan = Plan.of(parallel, p.cut, job.train.batch, order, p.frozen)
    bound_s = None if certificate is None else certificate.bound_s
    return plan.model_copy(update={"predicted_step_s": p.step_s, "bound_s": bound_s})


def deepest(job: JobSpec, profile: Profile) -> int:
    """Stages that the model can be cut into."""
    return job.model.layers if isinstance(job.model, GptSpec) else len(profile.layers)


@no_collection()
def choose(
    job: JobSpec,
    profile: Profile,
    devices: int | None = None,
    *,
    top: int = 10,
    asynchronous: bool = False,
    policy: str = "best",
    search_s: float = SEARCH_S,
    shared: Mapping[Sharing, Profile] = MappingProxyType({}),
    watch: Watch = ENDLESS,
) -> Decision:
    """The fastest plan that fits, or one that is simpler and about as fast (``NEAR``), and why the others lost.

    Args:
        job: what to train; ``parallel`` keys given beside ``auto: true`` must hold for the plan.
        profile: what the model costs on the cluster's devices.
        devices: how many there are; the profile's by default.
        top: how many of the best to name.
        asynchronous: schedules that train on stale weights may be chosen.
        policy: ``best``; or ``largest-microbatch``, Chimera's greedy rule (Li and Hoefler 2021, section 3.4).
        search_s: seconds for searching orders, at most; 0 for none.
        shared: profiles whose devices are groups that share each layer, by (size, ``sub_pipelined``); with none,
            no plan divides layers.
        watch: ends the choice with the best plan so far.

    Raises:
        SpecError: the profile is of another model, or no plan fits: the largest term, the excess, and what would.
    """
    began = time.monotonic()
    check_profile(job, profile)
    parallel, train = job.parallel, job.train
    check_statistics(parallel.shard, profile.batch_statistics)
    given, greedy = parallel.given if parallel.auto else {}, policy == "largest-microbatch"
    if given.get("schedule") == "auto" and search_s <= 0:
        raise SpecError(
            "parallel.schedule",
            "auto is an order that is searched for, and there is no time to search",
            "give --search some seconds, or leave the schedule out",
        )
    if given.get("slices", 1) > 1 and profile.slicing is not None and profile.slicing.refused:
        raise SpecError("parallel.slices", profile.slicing.refused, "use slices: 1")
    named = SAME_AS.get(str(given.get("schedule")), given.get("schedule"))
    asked = {key: given[key] for key in (*OPTIONS, *SHARDING, INNERMOST) if key in given}
    if named not in (None, "auto"):
        asked["schedule"] = named
    syncs = tuple(s for s in SYNCS if given.get("sync", s) == s)
    profiles = {ALONE: profile, **(shared if policy == "best" or "tensor" in given else {})}
    profiles = of_experts({Sharing(*key): own for key, own in profiles.items()}, given.get("experts"))
    orders_made = Orders()
    judge = Judges(
        {
            sharing: Predictor(
                as_exchanged(without_noise(own), train, parallel),
                train,
                deepest(job, own),
                syncs=syncs,
                recompute=ways_to_recompute(given.get("recompute"), greedy),
                asked=asked,
                slices=slice_counts(job, own) if sharing == ALONE and "slices" not in asked else (),
                divides=sharing.tensor == 1
                and not profile.batch_statistics
                and not parallel.replan
                and (not greedy or "shard" in given),
                _orders=orders_made,
            )
            for sharing, own in profiles.items()
        }
    )
    count = devices or profile.devices
    if profile.other_kinds and count > profile.devices:
        raise SpecError(
            "devices",
            f"{count} devices of a cluster that has {profile.devices}, of several kinds",
            f"use at most {profile.devices}",
        )
    every = [
        g
        for sharing, own in profiles.items()
        for g in grids(count, train.batch, deepest(job, own), 1, _largest(own), *sharing)
        if all(given.get(key, getattr(g, key)) == getattr(g, key) for key in GRID if key != "microbatches")
    ]
    if not every:
        fix = "give fewer keys, or others"
        if given.get("tensor", 1) not in {sharing.tensor for sharing in profiles}:
            fix = "costs of divided layers are computed, not measured: "
            fix += "--cluster, with a tensor that divides model and host"
        raise SpecError(
            "parallel", f"no plan on {count} devices has {_words(given)} at train.batch = {train.batch}", fix
        )
    chooser = _Chooser(job, judge, every, asynchronous, watch)

    def searched(count: int) -> Ranking:
        if greedy:
            return largest_microbatch(judge, every, count, chooser.pick)
        return best_first(judge, every, count, chooser.pick, NEAR, watch)

    found = searched(CONSIDERED)
    if not found.best:
        raise chooser.nothing_fits(found)
    ranked = sorted((judge.time(p, final=True) for p in found.best + found.near), key=rank_key)
    ranked = [*(judge.with_shards(p) for p in ranked[:DIVIDED]), *ranked]
    if not greedy:
        ranked += chooser.divided(min(p.step_s for p in ranked))
    ranked = sorted({id(p): p for p in ranked}.values(), key=rank_key)
    if (each_s := watch.share(1 / 4, search_s)) > 0 and "gather" not in given and not greedy:
        ranked = sorted([*ranked, *searched_gathers(judge, ranked, each_s)], key=rank_key)
    only = given.get("schedule") == "auto"
    each_s = min(search_s, LEAST_S) if only and watch.over else watch.share(1 / 3, search_s)
    if each_s > 0 and (only or "schedule" not in given):
        orders = searched_orders(judge, ranked, each_s, better=not only)
        if only and not orders:
            raise SpecError("parallel.schedule", "no order could be searched here", "leave it out, or name a schedule")
        ranked = orders if only else ranked + orders
    certifiers = Certifiers(judge)
    if (each_s := watch.share(1 / 2, search_s)) > 0 and not greedy and may_be_arranged(given):
        ranked = sorted(ranked, key=rank_key)
        ranked = ranked + better_plans(judge, ranked, each_s, certifiers)
    ranked = sorted(ranked, key=rank_key)
    fastest = ranked[0]
    best = fastest if greedy else simplest(ranked)  # the rule goes by the predicted time alone
    if top > CONSIDERED and not watch.over:  # the choice is made; these are further rows
        known = {p.candidate for p in ranked}
        more = [judge.time(p, final=True) for p in searched(top).best if p.candidate not in known]
        ranked = sorted([*ranked, *more], key=rank_key)
    ranked = [best, *(p for p in ranked if p is not best)][:top]
    rows = [Row(best, why_won(best, fastest)), *(Row(p, why_slower(p, best)) for p in ranked[1:])]
    rest = []
    for other in chooser.others(ranked):
        p = judge.time(other, final=True)
        refused = chooser.refusal(p.candidate)
        if refused is not None:
            why = why_refused(refused[1], p, best)
        else:
            why = why_slower(p, best) if p.fits else why_too_large(p, chooser.remedy(p))
        rest.append(Row(p, why, "compared"))
    rows += sorted(rest, key=lambda row: (not row.prediction.fits, rank_key(row.prediction)))
    rows += list(_faster_but_too_large(chooser, found, best))
    proof_s = watch.share(PROOF, min(MOST_PROOF_S, PROOF * search_s))
    rows = [
        replace(row, certificate=certifiers.certificate(row.prediction, proof_s if row is rows[0] else 0.0))
        if row.prediction.fits
        else row
        for row in rows
    ]
    c = best.candidate
    costed = judge.of(c).profile
    hosts = tuple(c.tensor * n for n in costed.placed.of_first(c.groups))
    kinds = tuple(costed.kinds[k].kind_name for k in costed.kind_of_host[: len(hosts)])
    plan = plan_of(best, job, rows[0].certificate).planned_for(job, profile.device_names, hosts, kinds)
    return Decision(
        plan=plan,
        rows=tuple(rows),
        searched=found.searched,
        timed=found.timed,
        left=found.left,
        seconds=time.monotonic() - began,
        notes=tuple(_notes(rows, profile, shared, count, given, greedy, slices_refused(job, profile))),
    )


def may_be_arranged(given: Mapping[str, object]) -> bool:
    """Return whether the keys that a job gives leave cut, placement and order to be searched together."""
    free = given.get("schedule", "auto") == "auto" and given.get("shard", "none") == "none"
    return free and given.get("recompute") != "full" and not any(key in given for key in (*OPTIONS, "placement"))


def _notes(
    rows: Sequence[Row],
    profile: Profile,
    shared: Mapping[Sharing, Profile],
    count: int,
    given: Mapping[str, object],
    greedy: bool,
    unsliced: str | None,
) -> Iterator[str]:
    """Return what a reader of the rows has to know."""
    if profile.other_kinds:
        yield (
            f"Devices of several kinds, numbered in this order: {profile.device_names}. Each copy takes its share of "
            "each kind. A stage that several devices hold is as slow as the slowest of them."
        )
    ranked = sum(row.group == "ranked" for row in rows)
    if any(row.group == "compared" for row in rows):
        yield (
            f"Below the first {ranked}: schedules that are not among them, each at its best on the divisions of the "
            "devices (D x W, B) that lead. Elsewhere they may do better, but no better than the rows above."
        )
    if given.get("tensor", 1) == 1 and "tensor" not in given and count > 1:
        if not shared and profile.source == "measured":
            yield (
                "T = 1 throughout: what a layer takes that several devices share is computed for a described cluster "
                "(--cluster), not measured."
            )
        elif shared and greedy:
            yield "T = 1 throughout: the rule of the largest micro-batch says nothing of devices that share a layer."
    best, certificate = rows[0].prediction, rows[0].certificate
    if unsliced is not None and count > 1 and "slices" not in given:
        yield f"No plan cuts micro-batches into slices along the sequence: {unsliced}."
    if best.candidate.devices == 1 and best.candidate.stages == 1:
        yield (
            "On one device, weight gradients may run on a second stream beside other layers: raypipe regions measures "
            "what that gains, and plans it (train.clip: null)."
        )
    if certificate is not None:
        yield certified(best, certificate)


def _faster_but_too_large(chooser: _Chooser, found: Ranking, best: Prediction) -> Iterator[Row]:
    """The plans that only memory rules out, one of each family."""
    seen: set[str] = set()
    tried = 0
    bounds = [(p.step_s, p.candidate) for p in found.too_large]
    bounds += [(chooser.judge.least(c), c) for c in found.unmade]
    for bound, c in sorted(bounds, key=lambda pair: (pair[0], pair[1].simplicity)):
        if bound >= best.step_s or len(seen) == TOO_LARGE or tried == 3 * TOO_LARGE or chooser.watch.over:
            return
        if label(c) in seen or c.recompute != "none":
            continue
        tried += 1
        try:
            timed = chooser.judge.predict(c, timed=True)
        except ScheduleError:  # the family has no such shape after all
            continue
        if timed.step_s < best.step_s:
            seen.add(label(c))
            yield Row(chooser.judge.time(timed, final=True), why_too_large(timed, chooser.remedy(timed)), "too large")


def _largest(profile: Profile) -> int:
    """The largest micro-batch that it has times of."""
    return max(size for layer in profile.layers for size in layer.times)


def _words(given: dict[str, object]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in given.items()) or "any shape"
