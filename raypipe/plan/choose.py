"""Choose a plan for a job: search, order the best placements anew, and say why everything else lost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from math import inf
from types import MappingProxyType
from typing import Any, Literal

from raypipe.cost.profile import Profile
from raypipe.cost.profile_check import check_profile
from raypipe.errors import ScheduleError, SpecError
from raypipe.job.parallel_spec import BUDGET, JOBS_OWN, ParallelSpec
from raypipe.job.spec import JobSpec
from raypipe.machine_code import compiling
from raypipe.plan.best_first import (
    NEAR,
    Ranking,
    best_first,
    effort_s,
    faster_cut,
    largest_microbatch,
    rank_key,
    simplest,
)
from raypipe.plan.candidate import Candidate, context_counts, slices_refused
from raypipe.plan.certificate.of_plan import Certificate, Certifiers
from raypipe.plan.choice import PlanChoice, choice_of
from raypipe.plan.divided_heads import divided_heads
from raypipe.plan.divided_heads import refused as no_divided_head
from raypipe.plan.joint.better_plans import better_plans
from raypipe.plan.plan import Plan
from raypipe.plan.predict.prediction import Prediction
from raypipe.plan.reasons import certified, why_refused, why_slower, why_too_large, why_won
from raypipe.plan.remedies import nothing_fits
from raypipe.plan.searched import searched_gathers, searched_orders
from raypipe.plan.tensor_groups import Judges, Sharing, expert_order
from raypipe.plan.watch import ENDLESS, SearchProgress, Watch
from raypipe.schedule import SCHEDULES
from raypipe.schedule.garbage_collection import no_collection
from raypipe.schedule.kinds import SHARDED
from raypipe.schedule.shape import OPTIONS, Grid

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
TOO_LARGE = 3
"""Plans named that would be faster and do not fit."""
PROOF, MOST_PROOF_S = 1 / 3, 1.0
"""Share of the time to search that the chosen plan's certificate may take, and how much at most."""
COMPARED = 1 / 3
"""Share of the time that is left for what a chosen plan is compared with in the table, and for its proof."""
FIRST_LOOK = 0.25
"""Share of the time that may go by with a look for a first plan before the costs of all are known."""
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

    choice: PlanChoice
    watch: Watch

    @property
    def judge(self) -> Judges:
        """Return what judges candidates."""
        return self.choice.judge

    @property
    def grids(self) -> list[Grid]:
        """Return every division of the devices that the job allows."""
        return self.choice.grids

    def others(self, ranked: list[Prediction]) -> Iterator[Prediction]:
        """The best of each family that is not among ``ranked``, on the grids of those that are."""
        seen = {label(p.candidate) for p in ranked}
        for kind, of_kind in (
            ("single device", [g for g in self.grids if g.stages == g.replicas == g.tensor == 1]),
            ("data parallel", [g for g in self.grids if g.stages == g.tensor == 1 < g.replicas]),
            ("tensor parallel", self._shared(ranked)),
        ):
            if kind not in seen and not self.watch.over:
                yield from best_first(self.judge, of_kind, 1, self.choice.wished, watch=self.watch, wanted=False).best
        deep = list(dict.fromkeys(p.candidate.grid for p in ranked if p.candidate.stages > 1))[:GRIDS]
        if not deep:
            deep = self.judge.promising(g for g in self.grids if g.stages > 1 == g.tensor)[:GRIDS]
        families: dict[str, list[Candidate]] = {name: [] for name in SCHEDULES if name not in seen}
        for grid in deep:
            for made in self.judge.of(grid).on(grid):
                c = self.choice.wished(made)
                if c is not None and c.schedule in families:
                    families[c.schedule].append(c)
        for own in families.values():
            tried = []
            for c in sorted(own, key=self._bounds)[:GRIDS]:
                judge = self.judge.of(c)
                if effort_s(c) > self.watch.share(1.0):
                    continue
                try:
                    tried.append(judge.predict(c, timed=True))
                    tried += [judge.predict(less) for _, less in judge.oom_fallback(tried[-1])]
                except ScheduleError:
                    continue
            if tried:
                best = min(tried, key=lambda p: (not p.fits, p.excess if not p.fits else 0.0, rank_key(p)))
                yield faster_cut(self.judge, best) if best.fits else best

    def _bounds(self, c: Candidate) -> tuple[float, float]:
        """Bounds on a candidate's step, and on those of its fallbacks too."""
        judge = self.judge.of(c)
        return judge.least(c), judge.least_of_all(c)

    def divided(self, step_s: float) -> list[Prediction]:
        """Copies of the whole model in several stages that divide its optimizer state (ZeRO-1) or its weights too
        (ZeRO-3), where memory does not ask for that but their gathers and reduce-scatters hide more of the link's time
        than whole sums do: the fastest of those tried, if enough shorter than ``step_s``."""
        best: Prediction | None = None
        for way in islice(self._ways_in_turn(step_s), DIVIDED_WAYS):
            most_s = step_s * (1 - (WORTH_DIVIDING if way.level == 3 else NEAR))
            most_s = most_s if best is None else min(most_s, best.step_s)
            if self.judge.of(way).least(way) >= most_s:
                continue
            for p in self._fitting(way, most_s):
                if p.step_s < most_s:
                    best = self.judge.of(way).time(p, final=True)
                    most_s = best.step_s
        return [] if best is None else [best]

    def _ways_in_turn(self, step_s: float) -> Iterator[Candidate]:
        """The best way to divide weights or state on each grid that may be faster than ``step_s``, then the second best
        on each, and so on, until the time is up. Of thousands of grids, few come to their turn."""
        grids = self.judge.promising(g for g in self.grids if g.stages == g.tensor == 1 < g.replicas)
        on_each: list[list[Candidate]] = []
        for grid in grids:
            if self.watch.over:
                return
            if self.judge.of(grid).least_on(grid) >= step_s:
                break
            if ways := self._divided_on(grid):
                on_each.append(ways[1:])
                yield ways[0]
        for way in itertools.chain.from_iterable(zip_longest(*on_each)):
            if self.watch.over:
                return
            if way is not None:
                yield way

    def _fitting(self, c: Candidate, step_s: float) -> Iterator[Prediction]:
        """The candidate if it fits, else what may be faster than ``step_s`` of what it can recompute."""
        judge = self.judge.of(c)
        try:
            p = judge.predict(c)
        except ScheduleError:
            return
        if p.fits:
            yield p
        for least, less in [] if p.fits else judge.oom_fallback(p):
            if least < step_s and less.level <= max(c.level, 2):  # ZeRO-2 takes no longer than ZeRO-1
                yield from self._fitting(less, step_s)

    def _divided_on(self, grid: Grid) -> list[Candidate]:
        """The ways to divide all weights on a grid, or optimizer state alone, by the time that each takes at least."""
        judge = self.judge.of(grid)
        made = [c for c in judge.on(grid) if c.shard == "none"]
        whole = {way for c in made for way in judge.shard_ways(c) if way.level == 3}
        state = {replace(way, shard="zero1") for way in whole if way.gather == "unit"}
        ways = [way for way in whole | state if self.choice.pick(way) == way]
        return sorted(ways, key=lambda way: (judge.least(way), way.simplicity))

    def _shared(self, ranked: list[Prediction]) -> list[Grid]:
        """Of the grids of groups that share layers, the most promising; none where the ranking has some already."""
        if any(p.candidate.tensor > 1 for p in ranked):
            return []
        return self.judge.promising(g for g in self.grids if g.tensor > 1)[:GRIDS]

    def remedy(self, p: Prediction) -> str | None:
        """The least change with which a plan that is too large would fit."""
        c = p.candidate
        judge = self.judge.of(c)
        for grid in sorted(self.grids, key=lambda g: -g.microbatch):
            smaller = c.sized(grid.microbatch, grid.microbatches)
            if grid.microbatch < c.microbatch and grid == smaller.grid and judge.holds(smaller):
                return f"microbatch {grid.microbatch}"
        if c.recompute == "none" and not c.form.recomputes and judge.holds(replace(c, recompute="full")):
            return "recompute: full"
        if c.shard == "none":
            return next((f"shard: {way.shard}" for way in judge.shard_ways(c) if judge.holds(way)), None)
        return None


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
    stay += ["expert_order"] if p.candidate.experts > 1 else []
    own = {key: value for key in stay if (value := job.parallel.given.get(key)) is not None}
    recomputed = {"recompute": tuple(sorted(p.recomputed))} if p.recomputed else {}
    return {**p.candidate.parallel(**keep, **own, **recomputed).model_dump(), "auto": False}


def plan_of(
    p: Prediction, job: JobSpec, certificate: Certificate | None = None, experts: tuple[tuple[int, ...], ...] = ()
) -> Plan:
    """The plan file of a prediction; ``experts``: the order in which copies hold them, if the job gives none."""
    order = None if p.order is None else replace(p.order, name=p.candidate.schedule)
    parallel = ParallelSpec.model_validate(parallel_of(p, job))
    parallel = parallel.model_copy(update={"expert_order": parallel.expert_order or experts})
    if order is not None and p.candidate.vocabulary == "split":
        # The keys say what is recomputed and gathered.
        order = replace(order.without({"R", *SHARDED}), sharding=None)
    plan = Plan.of(parallel, p.cut, job.train.batch, order, p.frozen)
    bound_s = None if certificate is None else certificate.bound_s
    return plan.model_copy(update={"predicted_step_s": p.step_s, "bound_s": bound_s})


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
    remedies: bool = True,
    earlier: PlanChoice | None = None,
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
        remedies: where no plan fits, find what would.
        earlier: what ``look_for_first`` returned.

    Raises:
        SpecError: the profile is of another model, or no plan fits: the largest term, the excess, and what would.
    """
    began = time.monotonic()
    check_profile(job, profile)
    greedy = policy == "largest-microbatch"
    choice = choice_of(
        job,
        profile,
        devices or profile.devices,
        shared=shared,
        asynchronous=asynchronous,
        greedy=greedy,
        earlier=earlier,
    )
    given, judge, count = choice.given, choice.judge, choice.count
    if given.get("schedule") == "auto" and search_s <= 0:
        raise SpecError(
            "parallel.schedule",
            "auto is an order that is searched for, and there is no time to search",
            "give --search some seconds, or leave the schedule out",
        )
    every = choice
    if given.get("experts") in (None, "auto") and not greedy:
        # Experts that must be divided over E copies and then again have small bounds, and gathers over slower links.
        choice = replace(choice, grids=[g for g in choice.grids if judge.of(g).room_on(g, again=1) > 0] or choice.grids)
    chooser = _Chooser(choice, watch)

    def searched(count: int) -> Ranking:
        if greedy:
            return largest_microbatch(judge, choice.grids, count, choice.pick)
        return best_first(judge, choice.grids, count, choice.pick, NEAR, watch)

    whole = given.get("vocabulary", "whole") == "whole"
    if not whole and (why := no_divided_head(choice)) is not None:
        raise SpecError("parallel.vocabulary", f"no plan divides the head: {why}", "use whole, or give the whole plan")
    result = searched(CONSIDERED) if whole else Ranking()
    if whole and not result.best and len(choice.grids) < len(every.grids):
        choice, chooser = every, _Chooser(every, watch)
        result = searched(CONSIDERED)
    heads = Ranking()
    if not greedy and not result.best and not ("vocabulary" in given and whole):
        heads = divided_heads(choice, inf, watch)
    if not whole and not heads.best:
        why = "no plan with these keys divides the head and fits the devices"
        raise SpecError("parallel.vocabulary", why, "use whole, leave other keys out, or use more devices")
    if not result.best and not heads.best:
        divided = []
        for copies in () if greedy or "context" in given else context_counts(job, profile, count):
            changed: Mapping[str, Any] = {"parallel": job.parallel.model_copy(update={"context": copies})}
            left: dict[str, Any] = {"top": top, "asynchronous": asynchronous, "search_s": search_s, "watch": watch}
            left["remedies"] = False
            with suppress(SpecError):
                divided.append(choose(job.model_copy(update=changed), profile, devices, **left))
        if divided:
            return min(divided, key=lambda decision: decision.best.step_s)
        raise nothing_fits(choice, result) if remedies else SpecError("memory", "no plan fits", "use more devices")
    watch.found_plan()
    certifiers = Certifiers(judge)
    ranked = heads.best or _improved(chooser, result.best + result.near, certifiers, search_s)
    if not heads.best and not greedy and "vocabulary" not in given:
        heads = divided_heads(choice, min(p.step_s for p in ranked), watch)
        ranked = ranked + heads.best
    ranked = sorted(ranked, key=rank_key)
    fastest = ranked[0]
    best = fastest if greedy else simplest(ranked)  # the rule goes by the predicted time alone
    if top > CONSIDERED and not watch.over:  # the choice is made; these are further rows
        known = {p.candidate for p in ranked}
        more = [p for p in searched(top).best if p.candidate not in known]
        more = [judge.of(p.candidate).time(p, final=True) for p in more]
        ranked = sorted([*ranked, *more], key=rank_key)
    ranked = [best, *(p for p in ranked if p is not best)][:top]
    rows = [Row(best, why_won(best, fastest)), *(Row(p, why_slower(p, best)) for p in ranked[1:])]
    rest = []
    chooser = replace(chooser, watch=watch.part(COMPARED))
    for other in chooser.others(ranked):
        p = judge.of(other.candidate).time(other, final=True)
        refused = choice.refusal(p.candidate)
        if refused is not None:
            why = why_refused(refused[1], p, best)
        else:
            why = why_slower(p, best) if p.fits else why_too_large(p, chooser.remedy(p))
        rest.append(Row(p, why, "compared"))
    rows += sorted(rest, key=lambda row: (not row.prediction.fits, rank_key(row.prediction)))
    rows += list(_faster_but_too_large(chooser, result, best))
    proof_s = watch.share(PROOF, min(MOST_PROOF_S, PROOF * search_s))
    rows = [
        replace(row, certificate=certifiers.certificate(row.prediction, proof_s if row is rows[0] else 0.0))
        if row.prediction.fits and row.prediction.candidate.vocabulary == "whole"  # the bounds are of whole layers
        else row
        for row in rows
    ]
    c = best.candidate
    costed = judge.of(c).profile
    hosts = tuple(c.tensor * n for n in costed.placed.of_first(c.groups))
    kinds = tuple(costed.kinds[k].kind_name for k in costed.kind_of_host[: len(hosts)])
    plan = plan_of(best, job, rows[0].certificate, expert_order(profile, c.experts))
    plan = plan.planned_for(job, profile.device_names, hosts, kinds)
    return Decision(
        plan=plan,
        rows=tuple(rows),
        searched=result.searched + heads.searched,
        timed=result.timed + heads.timed,
        left=result.left,
        seconds=time.monotonic() - began,
        notes=tuple(_notes(rows, profile, shared, count, given, greedy, slices_refused(job, profile))),
    )


def _improved(
    chooser: _Chooser, found: Sequence[Prediction], certifiers: Certifiers, search_s: float
) -> list[Prediction]:
    """The best plans that were found, and what shards, gathers, orders and cuts make of them."""
    choice, judge, watch = chooser.choice, chooser.judge, chooser.watch
    given, greedy = choice.given, choice.greedy
    ranked = sorted((judge.of(p.candidate).time(p, final=True) for p in found), key=rank_key)
    ranked = [*(judge.of(p.candidate).with_shards(p) for p in ranked[:DIVIDED]), *ranked]
    if not greedy:
        ranked += chooser.divided(min(p.step_s for p in ranked))
    ranked = sorted({id(p): p for p in ranked}.values(), key=rank_key)
    while compiling() and not watch.over:  # what is searched from here on runs as machine code
        time.sleep(0.02)
    if (each_s := watch.share(1 / 4, search_s)) > 0 and "gather" not in given and not greedy:
        ranked = sorted([*ranked, *searched_gathers(judge, ranked, each_s)], key=rank_key)
    only = given.get("schedule") == "auto"
    each_s = min(search_s, LEAST_S) if only and watch.over else watch.share(1 / 3, search_s)
    if each_s > 0 and (only or "schedule" not in given):
        orders = searched_orders(judge, ranked, each_s, better=not only)
        if only and not orders:
            raise SpecError("parallel.schedule", "no order could be searched here", "leave it out, or name a schedule")
        ranked = orders if only else ranked + orders
    if (each_s := watch.share(1 / 2, search_s)) > 0 and not greedy and may_be_arranged(given):
        ranked = sorted(ranked, key=rank_key)
        ranked = ranked + better_plans(judge, ranked, each_s, certifiers)
    return ranked


class _OthersKnownError(Exception):
    """The costs of all plans are known, so that all can be searched."""


def look_for_first(
    job: JobSpec,
    profile: Profile,
    devices: int | None,
    watch: Watch,
    ready: Callable[[], bool],
    shared: Mapping[Sharing, Profile] = MappingProxyType({}),
) -> PlanChoice | None:
    """Look for any plan while the costs of others are still being found, until they are ``ready``, and show it.

    Returns:
        What was searched, for ``choose`` to go on from; None if no plan has these costs.
    """

    def show(progress: SearchProgress) -> None:
        watch.show(progress.best_s, lambda: progress)

    look = watch.budget.part(FIRST_LOOK)

    def stop() -> bool:
        # Where no plan fits that shares nothing, the search would otherwise rule out all of them first.
        if ready() or look.left <= 0 < watch.budget.left:
            raise _OthersKnownError
        return watch.first_plan is not None or watch.stop()

    try:
        choice = choice_of(job, profile, devices or profile.devices, shared=shared)
    except SpecError:
        return None
    with suppress(_OthersKnownError):
        best_first(choice.judge, choice.grids, 1, choice.pick, watch=Watch(watch.budget, show, stop))
    return choice


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
    if profile.dtype == "bfloat16" and any(layer.expert_parameters for layer in profile.layers):
        yield (
            "Experts compute in float32: torch's autocast (train.dtype: bfloat16) has no rule for their grouped "
            "products. With train.dtype: bfloat16-true they compute in bfloat16."
        )
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
    bounds += [(chooser.judge.of(c).least(c), c) for c in found.unmade]
    for bound, c in sorted(bounds, key=lambda pair: (pair[0], pair[1].simplicity)):
        if bound >= best.step_s or len(seen) == TOO_LARGE or tried == 3 * TOO_LARGE or chooser.watch.over:
            return
        if label(c) in seen or c.recompute != "none":
            continue
        tried += 1
        try:
            judge = chooser.judge.of(c)
            timed = judge.predict(c, timed=True)
        except ScheduleError:  # the family has no such shape after all
            continue
        if timed.step_s < best.step_s:
            seen.add(label(c))
            yield Row(judge.time(timed, final=True), why_too_large(timed, chooser.remedy(timed)), "too large")
